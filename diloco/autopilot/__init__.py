"""Choose sync settings from measurements of the first steps and the link."""
