//! Secrets: can be set and listed by name, never read back.

use serde::Deserialize;

/// `PUT /v1/secrets/{name}`. Only the gateway uses the value; no request returns it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetSecret {
    /// The secret value.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub value: crate::Secret<String>,
}
