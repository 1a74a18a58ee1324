"""Rounds over a network, with Flower as the transport. Needs the extra `fedkseed[flower]`.

server/          the server's side: ServerApp, processes
client/          the client's side: ClientApp, processes
messages.py      bytes in Flower's messages
compat.py        workarounds for Flower, with the version that needs each
children.py      Flower's programs, as child processes that end with their parent
cli.py           the commands
simulation.py    many virtual clients on Flower's simulation engine
strategy.py      our algorithms inside another Flower project
loopback.py      a Grid in one process
"""
