"""What a run did, from its folder alone: in the terminal while it goes on and after it, and as one HTML file."""
