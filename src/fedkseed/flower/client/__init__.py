"""The client of a federation over Flower.

app.py           our ClientApp, which Flower starts in a new process for each message: hands bytes to the worker
executor.py      Flower's program `flwr-clientapp`, changed to run our ClientApp and no other
worker.py        a process that keeps a client's model loaded, and answers tasks
supervisor.py    the SuperNode and its executor, watched and started again
sockets.py       frames between a client's processes
consent.py       the recipe that a client follows, made of a server's and its owner's settings; the journal of recipes
policy.py        the limits of what a server's recipe may ask of a client
"""
