"""The page on which a job is watched, and its metrics: a process of its own that reads and never decides.

Here live the web server, what it shows and who may see it; starlette and uvicorn (extra ``dashboard``) are imported
only when the page is asked for. Never here: anything that a job needs in order to go on.
"""
