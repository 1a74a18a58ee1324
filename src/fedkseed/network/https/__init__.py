"""A federation over plain HTTPS: three requests of a few hundred bytes a round, and files that any cache may serve.

stub.py      a task without its large parts, which are files named by their SHA-256
hub.py       the server's side as a state: who is connected, who owes which answer
app.py       the five requests that a client can make, as an ASGI application
server.py    rounds on one thread, requests on another
join.py      a client: waits for tasks, hands them to its worker, sends the replies
cli.py       the commands serve and join

Tasks, replies and signatures are those of every transport (docs/session.md): this one carries them.
"""
