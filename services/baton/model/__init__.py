"""The real device: transformers models over paged KV memory. Importing torch and transformers is for this
package alone."""
