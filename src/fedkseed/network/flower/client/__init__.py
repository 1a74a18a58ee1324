"""The client of a federation over Flower.

app.py           our ClientApp, which Flower starts in a new process for each message: hands bytes to the worker
executor.py      Flower's program `flwr-clientapp`, changed to run our ClientApp and no other
supervisor.py    the SuperNode and its executor, watched and started again
"""
