"""The bytes of a point: manifest, tensor header, tensor parts and trees of plain values. Pure: no files here."""
