"""LMCache's own files, in and out.

``blob`` reads and writes its CacheGen blobs, ``fp8`` and ``turboquant`` the raw bytes of its serdes of
these names; ``cachegen`` turns caches into blobs and back, bit for bit; ``convert`` makes ``.kvz`` files of them and
them of ``.kvz`` files. Nothing here needs LMCache or torch, and nothing runs what a file says.
"""
