"""Several machines: what is said, and over what.

limits.py       what others may send, keep open and cost
http_server.py  a server of HTTP within these limits
http_client.py  a client of HTTPS within them
protocol/       tasks, replies, signatures, whatever carries them
https/          a server and its clients
peers/          a federation without a server
flower/         over Flower
"""
