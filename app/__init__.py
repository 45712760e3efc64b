"""The local application: settings, library of documents, ingest, questions, command line, server, benches."""
