"""A federation over plain HTTPS: three requests of a few hundred bytes a round, and files that any cache may serve.

task_files.py       a task without its large parts, which are files named by their SHA-256
connections.py      the server's side as a state: who is connected, who owes which answer
app.py              the six requests that a client can make, as an ASGI application
way_out.py          the proxy that the environment names, or none
browser_page.py     the page on which a browser takes part
registered_keys.py  the clients' keys, which may change while the server runs
server.py           rounds on one thread, requests on another
join.py             a client: waits for tasks, hands them to its worker, sends the replies
shard.py            a server of some clients that is a client of another server

Tasks, replies and signatures are those of every transport (docs/session.md): this one carries them.
"""
