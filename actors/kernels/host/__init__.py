"""The catalogue of the host, loops and branches over bodies, the rates of this machine."""
