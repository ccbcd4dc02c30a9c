//! Secrets: can be set and listed by name, never read back.

use serde::{Deserialize, Serialize};

use crate::{SecretScope, SessionId, Timestamp};

/// `PUT /v1/secrets/{name}`. Only the gateway uses the value; no request returns it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetSecret {
    /// The secret value.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub value: crate::Secret<String>,
    /// Hosts to whose requests over TLS the gateway adds the value; each a whole name. When absent,
    /// hosts and header stay as they are.
    #[cfg_attr(feature = "openapi", schema(max_items = 16))]
    pub hosts: Option<Vec<String>>,
    /// The header to add, with `{}` for the value; `Authorization: Bearer {}` when absent.
    pub header: Option<String>,
}

/// A stored secret, without its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoredSecret {
    /// Name of the secret.
    pub name: String,
    /// Where it may be used. Of several secrets with one name, that of the narrowest scope is used.
    pub scope: SecretScope,
    /// The session's id, the repository's name or the user's address; null for the whole server.
    pub owner: Option<String>,
    /// Hosts to whose requests the gateway adds it.
    pub hosts: Vec<String>,
    /// The header that it is added as, with `{}` for the value; null without hosts.
    pub header: Option<String>,
    /// Time of the last change.
    pub updated_at: Timestamp,
}

/// A request to which the gateway added a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SecretUse {
    /// Name of the secret.
    pub name: String,
    /// Scope of the secret.
    pub scope: SecretScope,
    /// The session; null for a build.
    pub session: Option<SessionId>,
    /// The turn in progress; 0 outside of turns.
    pub turn: u32,
    /// The host that received it.
    pub host: String,
    /// Method of the request.
    pub method: String,
    /// Path of the request, without its query.
    pub path: String,
    /// Time of the request.
    pub at: Timestamp,
}
