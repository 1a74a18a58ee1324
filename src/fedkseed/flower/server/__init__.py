"""The server of a federation over Flower.

app.py           the ServerApp for Flower: our loop over rounds, on a Grid
federation.py    the parts of a run with clients of a network
grid.py          the transport of a round, to clients behind a Grid
processes.py     SuperLink, executor and nginx, watched and started again
journal.py       the progress of a ServerApp, as a file
"""
