"""Does the autopilot find the settings that a search by brute force finds, and follow a link that changes?"""
