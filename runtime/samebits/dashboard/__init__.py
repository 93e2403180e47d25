"""The dashboard: a page that shows a job, and its metrics, served by a process of its own.

The process reads the job's state and decides nothing, so no job depends on it. starlette and uvicorn (extra
``dashboard``) are imported only when the page is requested.
"""
