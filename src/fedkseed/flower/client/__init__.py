"""A client of a federation over Flower.

app.py           Flower's ClientApp: hands bytes to the worker, Flower starts a new process for each message
executor.py      Flower's program that runs our ClientApp and no other
worker.py        keeps a client's model loaded, and answers
supervisor.py    a SuperNode and its executor, watched and started again
sockets.py       frames between a client's processes
consent.py       what a client does by a server's wish, and what it refuses
"""
