"""Versioned tables: data files, and the manifest that lists one version of every table.

    OUT/manifest.json                 the current version of every table, replaced last
    OUT/_manifests/000012.json        the same for each earlier run
    OUT/TABLE/part-ID.parquet         data files, which never change
    OUT/TABLE/_delta_log/             the log of a Delta table

A run writes new data files, commits each table, then replaces the manifest. Readers start at the
manifest, so all tables that they see are of the same run. A run that is killed leaves files that no
manifest lists. The next run commits from the manifest again, so its tables contain nothing of the
killed one. Works on local directories and, by Arrow, on S3. Knows nothing of Spark, or of the
meaning of a table.
"""
