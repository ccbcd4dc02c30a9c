//! Pulls images from OCI registries: fetches the manifest, checks every digest, and streams each
//! layer into the unpacker. Stores nothing compressed and pushes nothing. There is no default
//! registry: a reference begins with one.

mod auth;
mod http;
mod manifest;
mod pull;
mod reference;
mod registry;

use std::{path::PathBuf, time::Duration};

pub(crate) use pull::pull;
pub(crate) use reference::{Digest, Reference, shown};

use crate::unpack::{UnpackError, UnpackLimits};

/// Options of [`pull`](crate::pull).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullOptions {
    /// Limits of each layer.
    pub limits: UnpackLimits,
    /// How often a request is tried.
    pub attempts: u32,
    /// The pause before the second attempt; doubled before each later one.
    pub backoff: Duration,
    /// How long a registry may send nothing.
    pub idle_timeout: Duration,
    /// The folder of the Docker configuration with the logins; the user's own when `None`.
    pub docker_config: Option<PathBuf>,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            limits: UnpackLimits::default(),
            attempts: 4,
            backoff: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(60),
            docker_config: None,
        }
    }
}

/// Why an image could not be pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The reference is invalid.
    #[error("invalid image reference `{text}`: {reason}")]
    Reference {
        /// The reference, without a login.
        text: String,
        reason: &'static str,
    },
    /// The registry cannot be reached, or the connection broke in every attempt.
    #[error("cannot reach {host}, tried {attempts} times")]
    Unreachable { host: String, attempts: u32, source: Box<dyn std::error::Error + Send + Sync> },
    /// The registry's certificate is not trusted.
    #[error(
        "the certificate of {host} is not trusted; set SSL_CERT_FILE to a bundle with its authority"
    )]
    Certificate { host: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// The registry answered with an unexpected status.
    #[error("{host} answered {status} to {path}{}", match attempts { 1 => String::new(), _ => format!(", tried {attempts} times") })]
    Status { host: String, path: String, status: u16, attempts: u32 },
    /// The registry does not have the image or a part of it.
    #[error("{host} has no {what}")]
    Missing { host: String, what: String },
    /// The registry needs a login.
    #[error("{host} requires a login; {advice}")]
    Login { host: String, advice: &'static str },
    /// The registry redirects to a URL that is not allowed.
    #[error("{host} redirects to `{to}`, which is not allowed")]
    Redirect {
        host: String,
        /// The target, without its query.
        to: String,
    },
    /// A document is invalid.
    #[error("invalid {what}: {reason}")]
    Document { what: &'static str, reason: String },
    /// The image is for another platform.
    #[error("the image is for {found}, not for {wanted}")]
    Platform { wanted: String, found: String },
    /// Bytes do not match their digest or size.
    #[error("digest mismatch of the {what}: expected {expected}, got {found}")]
    Digest { what: String, expected: String, found: String },
    /// A layer cannot be unpacked.
    #[error("cannot unpack layer {digest}")]
    Layer { digest: String, source: UnpackError },
}
