//! HTTP, SSE, auth, OpenAPI. Translates; decides nothing.
