"""The report as a page that lives: a small server that follows runs, and sends to browsers what is new."""
