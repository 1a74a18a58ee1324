"""The server of a federation over Flower.

app.py           the ServerApp for Flower: our loop over rounds, on a Grid
rounds.py        the parts of a run with clients of a network, with or without a model
clients.py       the transport of a round: who is asked, asked again, refused and left out
processes.py     SuperLink, executor and nginx, watched and started again; the clients' keys
status_file.py   the progress of a ServerApp, as a file
"""
