"""What torch calls: how it finds the backend, makes groups of it, and what loads the extension. Uses nothing of the tools."""
