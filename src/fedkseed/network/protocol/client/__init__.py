"""A client's side of a federation.

worker.py          a process that keeps a client's model loaded, and answers tasks
training_client.py what a client loads for a recipe, what a message may ask for, how it is answered, what was gained
task_handler.py    what all that answer tasks do: a task is verified, its answer signed and kept
worker_process.py  starts and ends the worker, and hands it tasks over a socket
recipe_consent.py  the recipe that a client follows, made of a server's and its owner's settings; the journal of recipes
policy.py          the limits of what a server's recipe may ask of a client
privacy_spent.py   the account of privacy that answers have spent
"""
