"""Rounds over a network, carried by Flower. Needs the extra `fedkseed[flower]`.

server/          a server's side: ServerApp, processes, the way to its clients
client/          a client's side: ClientApp, worker, processes, consent
envelope.py      what travels around a message
messages.py      bytes in Flower's messages
recipes.py       recipes over a network
compat.py        all that works around Flower, by version
children.py      Flower's programs, as children that end with their parent
certs.py cli.py  keys and certificates; the three commands
simulation.py    many virtual clients on Flower's own engine
strategy.py      our algorithms in a Flower project that is there already
loopback.py      a Grid in one process
"""
