//! Secrets: written, never read back.

use serde::Deserialize;

/// `PUT /v1/secrets/{name}`. Written, used by the gateway, never read back.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetSecret {
    /// The value.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub value: crate::Secret<String>,
}
