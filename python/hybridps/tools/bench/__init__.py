"""`hybridps bench`: session.py measures, figures.py reckons, show.py renders, command.py is the command."""
