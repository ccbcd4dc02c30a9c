//! Images from an OCI registry: asks for the manifest, checks every digest, and streams each layer
//! straight into the unpacker. Nothing is kept compressed, nothing is pushed. There is no default
//! registry: a reference names its own.

mod auth;
mod http;
mod manifest;
mod pull;
mod reference;
mod registry;
mod stream;

use std::{path::PathBuf, time::Duration};

pub(crate) use pull::{Pulled, pull};
pub(crate) use reference::{Reference, shown};

use crate::unpack::{UnpackError, UnpackLimits};

/// How patiently to pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullOptions {
    /// How much one layer may become.
    pub limits: UnpackLimits,
    /// How often something is asked for before giving up.
    pub attempts: u32,
    /// How long to wait before the second attempt; twice as long before each later one.
    pub backoff: Duration,
    /// How long a registry may say nothing.
    pub silence: Duration,
    /// The folder of the Docker configuration that has the logins; the user's own when absent.
    pub docker_config: Option<PathBuf>,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            limits: UnpackLimits::default(),
            attempts: 4,
            backoff: Duration::from_secs(1),
            silence: Duration::from_secs(60),
            docker_config: None,
        }
    }
}

/// Why an image could not be pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The text is no reference.
    #[error("`{text}` is no image reference: {reason}")]
    Reference {
        /// The text.
        text: String,
        /// Why.
        reason: &'static str,
    },
    /// Nobody answered, or the connection broke, each time it was tried.
    #[error("{host} did not answer, tried {attempts} times")]
    Unreachable {
        /// Who.
        host: String,
        /// How often it was tried.
        attempts: u32,
        /// What happened the last time.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The registry cannot prove who it is.
    #[error(
        "the certificate of {host} is not trusted; name a bundle that has its authority in SSL_CERT_FILE"
    )]
    Certificate {
        /// Who.
        host: String,
        /// What is wrong with it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The registry said something else than yes.
    #[error("{host} answered {status} to {path}{}", match attempts { 1 => String::new(), _ => format!(", tried {attempts} times") })]
    Status {
        /// Who.
        host: String,
        /// To what.
        path: String,
        /// The HTTP status.
        status: u16,
        /// How often it was tried.
        attempts: u32,
    },
    /// The registry does not know the image.
    #[error("{host} has no {what}")]
    Missing {
        /// Who.
        host: String,
        /// The image or blob.
        what: String,
    },
    /// The registry wants to know who we are.
    #[error("{host} wants a login; {advice}")]
    Login {
        /// Who.
        host: String,
        /// What to do.
        advice: &'static str,
    },
    /// The registry sends us somewhere we do not go.
    #[error("{host} refers to `{to}`, which is not followed")]
    Redirect {
        /// Who.
        host: String,
        /// Where to, without its query.
        to: String,
    },
    /// A document makes no sense.
    #[error("the {what} makes no sense: {reason}")]
    Document {
        /// Which.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The image is for other machines.
    #[error("the image is for {found}, not for {wanted}")]
    Platform {
        /// This host's.
        wanted: String,
        /// Theirs.
        found: String,
    },
    /// Bytes are not what they were said to be.
    #[error("the {what} is not what it should be: {found} instead of {expected}")]
    Digest {
        /// Of what.
        what: String,
        /// What was promised.
        expected: String,
        /// What came.
        found: String,
    },
    /// A layer cannot be unpacked.
    #[error("cannot unpack layer {digest}")]
    Layer {
        /// Its digest.
        digest: String,
        /// Why.
        source: UnpackError,
    },
}
