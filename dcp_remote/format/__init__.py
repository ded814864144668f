"""Documents, shard headers and object keys of the format that FORMAT.md specifies. No I/O, no torch.

manifest and catalog hold the values. manifest_json and catalog_json encode and decode them, document seals the JSON
with a digest and checks the version, columns packs integers, manifest_validation (with tiling) checks numbers, segments
divides a large manifest. shard writes the header of a shard; keys makes and parses object keys. json_tree, json_text
and raw_buffers write a Python object as JSON; empty_dicts and entry_names work on the names of entries; dtypes lists
the element types. schema/ has JSON Schemas of the documents.
"""
