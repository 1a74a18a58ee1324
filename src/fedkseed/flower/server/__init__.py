"""The server of a federation over Flower.

app.py           Flower's ServerApp: our loop over rounds, on a Grid
federation.py    the rounds of that loop
grid.py          clients behind a Grid, as the transport of a round
processes.py     SuperLink, executor and nginx, watched and started again
journal.py       the progress of a ServerApp, as a file
"""
