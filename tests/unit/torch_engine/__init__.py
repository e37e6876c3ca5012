"""The bundled torch engine, on models of a few thousand random weights."""
