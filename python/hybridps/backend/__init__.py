"""What torch calls: how it finds the backend and makes groups of it, and what loads the extension."""
