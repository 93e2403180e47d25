"""The dashboard: a page that shows a job, and the job's metrics, served by a separate process.

The process only reads the job's state, so no job depends on it. starlette and uvicorn (extra ``dashboard``) are
imported only if the page is served.
"""
