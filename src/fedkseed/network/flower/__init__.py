"""Flower as its users know it: apps for its SuperLink and SuperNodes. Needs the extra `fedkseed[flower]`.

server_app.py    the ServerApp: the rounds of a run, over Flower's Grid
client_app.py    the ClientApp: hands a task to the worker that keeps the model loaded
strategy.py      our algorithms inside another Flower project
grid_carrier.py  tasks and replies on Flower's Grid
messages.py      bytes in Flower's messages
compat.py        Flower's numbers of errors

examples/flower is an app that names the first two.
"""
