"""Functions of the public API that put the other packages together; the command line calls them too. Import them from
`thinpipe`, which lists every public name."""
