"""The server of a federation over Flower.

app.py           the ServerApp for Flower: our loop over rounds, on a Grid
carrier.py       tasks and replies on a Grid
processes.py     SuperLink, executor and nginx, watched and started again; the clients' keys
superlink.py     Flower's SuperLink with limits of requests
status_file.py   the progress of a ServerApp, as a file
"""
