"""What a profiled step loses to communication, and which line wins it back: `counterpoint.advise`.

The core (plans, operators, runtime) knows nothing of this folder.
"""
