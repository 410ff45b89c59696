"""Models: loading, tokenizer checks, caches that can be rewound, and the embedded family."""
