//! A registry client for one image: fetches manifests and blobs, logs in on demand, and retries.

use std::{cell::RefCell, io, thread};

use harvest_proto::Secret;
use serde::Deserialize;
use ureq::{
    Body, BodyReader,
    http::{Response, header},
};

use super::{
    PullError, PullOptions, Reference,
    auth::{self, Challenge, Credentials},
    http::{Client, RequestError},
};

// Manifests, configurations and tokens of real registries have kilobytes.
const MAX_DOCUMENT_BYTES: u64 = 4 << 20;

const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// A connection to the registry of one image.
pub(super) struct Registry<'a> {
    client: Client,
    reference: &'a Reference,
    options: &'a PullOptions,
    credentials: Credentials,
    /// The value of the `Authorization` header, after the registry asked for it.
    authorization: RefCell<Option<Secret<String>>>,
}

/// Why a blob was not accepted.
pub(super) enum BlobError {
    /// The connection broke; another attempt may succeed.
    Interrupted(io::Error),
    /// The blob is invalid.
    Refused(PullError),
}

/// The result of one attempt.
enum Attempt<T> {
    Done(T),
    /// A temporary error.
    Retry(PullError),
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl<'a> Registry<'a> {
    pub(super) fn new(reference: &'a Reference, options: &'a PullOptions) -> Self {
        let credentials = auth::credentials(&reference.host, options.docker_config.as_deref());
        Self {
            client: Client::new(options),
            reference,
            options,
            credentials,
            authorization: RefCell::new(None),
        }
    }

    /// Fetches a manifest by tag or digest.
    pub(super) fn manifest(&self, wanted: &str) -> Result<Vec<u8>, PullError> {
        self.document(&format!("manifests/{wanted}"), MANIFESTS)
    }

    /// Fetches a small blob.
    pub(super) fn small_blob(&self, digest: &str) -> Result<Vec<u8>, PullError> {
        self.document(&format!("blobs/{digest}"), "*/*")
    }

    /// Streams a blob into `take`; starts again from the beginning when the connection breaks.
    pub(super) fn blob<T>(
        &self,
        digest: &str,
        mut take: impl FnMut(BodyReader<'static>) -> Result<T, BlobError>,
    ) -> Result<T, PullError> {
        let path = format!("blobs/{digest}");
        self.with_retries(|attempt| match self.request(&path, "*/*", attempt)? {
            Attempt::Retry(error) => Ok(Attempt::Retry(error)),
            Attempt::Done(response) => {
                match take(response.into_body().into_with_config().limit(u64::MAX).reader()) {
                    Ok(taken) => Ok(Attempt::Done(taken)),
                    Err(BlobError::Interrupted(error)) => {
                        Ok(Attempt::Retry(self.unreachable(attempt, error.into())))
                    }
                    Err(BlobError::Refused(error)) => Err(error),
                }
            }
        })
    }

    fn document(&self, path: &str, accept: &str) -> Result<Vec<u8>, PullError> {
        self.with_retries(|attempt| match self.request(path, accept, attempt)? {
            Attempt::Retry(error) => Ok(Attempt::Retry(error)),
            Attempt::Done(response) => {
                match response
                    .into_body()
                    .into_with_config()
                    .limit(MAX_DOCUMENT_BYTES)
                    .read_to_vec()
                {
                    Ok(bytes) => Ok(Attempt::Done(bytes)),
                    Err(ureq::Error::BodyExceedsLimit(_)) => {
                        let reason = format!("it is larger than {MAX_DOCUMENT_BYTES} bytes");
                        Err(PullError::Document { what: "answer of the registry", reason })
                    }
                    Err(error) => Ok(Attempt::Retry(self.unreachable(attempt, error.into()))),
                }
            }
        })
    }

    fn with_retries<T>(
        &self,
        mut attempt: impl FnMut(u32) -> Result<Attempt<T>, PullError>,
    ) -> Result<T, PullError> {
        let attempts = self.options.attempts.max(1);
        let mut pause = self.options.backoff;
        for number in 1.. {
            match attempt(number)? {
                Attempt::Done(done) => return Ok(done),
                Attempt::Retry(error) if number == attempts => return Err(error),
                Attempt::Retry(_) => thread::sleep(pause),
            }
            pause *= 2;
        }
        unreachable!("the last attempt returns")
    }

    fn request(
        &self,
        path: &str,
        accept: &str,
        attempt: u32,
    ) -> Result<Attempt<Response<Body>>, PullError> {
        let Reference { scheme, host, name, .. } = self.reference;
        let url = format!("{scheme}://{host}/v2/{name}/{path}");
        let mut logged_in = false;
        loop {
            let authorization =
                self.authorization.borrow().as_ref().map(|value| value.expose().clone());
            let response = match self.client.get(&url, accept, authorization.as_deref()) {
                Ok(response) => response,
                Err(RequestError::Temporary(error)) => {
                    return Ok(Attempt::Retry(self.unreachable(attempt, error.into())));
                }
                Err(RequestError::Refused(error)) => return Err(error),
            };
            match response.status().as_u16() {
                200 => return Ok(Attempt::Done(response)),
                401 if !logged_in => {
                    logged_in = true;
                    if let Attempt::Retry(error) = self.log_in(&response, attempt)? {
                        return Ok(Attempt::Retry(error));
                    }
                }
                401 | 403 => return Err(self.login_required()),
                404 => {
                    return Err(PullError::Missing {
                        host: host.clone(),
                        what: format!("{name}/{path}"),
                    });
                }
                status if status == 429 || status >= 500 => {
                    return Ok(Attempt::Retry(self.status(path, status, attempt)));
                }
                status => return Err(self.status(path, status, 1)),
            }
        }
    }

    fn log_in(&self, response: &Response<Body>, attempt: u32) -> Result<Attempt<()>, PullError> {
        let headers = response.headers().get_all(header::WWW_AUTHENTICATE);
        let mut challenges: Vec<_> =
            headers.iter().filter_map(|value| Challenge::parse(value.to_str().ok()?)).collect();
        // Bearer first: a token is less valuable to an attacker than a password.
        challenges.sort_by_key(|challenge| *challenge == Challenge::Basic);
        let value = match challenges.into_iter().next() {
            None => return Err(self.login_required()),
            Some(Challenge::Basic) => {
                self.credentials.login.as_ref().ok_or_else(|| self.login_required())?.header()
            }
            Some(Challenge::Bearer { realm, service, scope }) => {
                match self.token(&realm, service.as_deref(), scope.as_deref(), attempt)? {
                    Attempt::Done(token) => format!("Bearer {token}"),
                    Attempt::Retry(error) => return Ok(Attempt::Retry(error)),
                }
            }
        };
        *self.authorization.borrow_mut() = Some(Secret::new(value));
        Ok(Attempt::Done(()))
    }

    fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: Option<&str>,
        attempt: u32,
    ) -> Result<Attempt<String>, PullError> {
        let pull = format!("repository:{}:pull", self.reference.name);
        let mut url = format!(
            "{realm}{}scope={}",
            if realm.contains('?') { '&' } else { '?' },
            percent_encode(scope.unwrap_or(&pull))
        );
        if let Some(service) = service {
            url += &format!("&service={}", percent_encode(service));
        }
        let login = self.credentials.login.as_ref().map(auth::Login::header);
        let response = match self.client.get(&url, "application/json", login.as_deref()) {
            Ok(response) => response,
            Err(RequestError::Temporary(error)) => {
                return Ok(Attempt::Retry(self.unreachable(attempt, error.into())));
            }
            Err(RequestError::Refused(error)) => return Err(error),
        };
        match response.status().as_u16() {
            200 => {}
            status if status == 429 || status >= 500 => {
                return Ok(Attempt::Retry(self.status("token", status, attempt)));
            }
            _ => return Err(self.login_required()),
        }
        let bytes = response.into_body().into_with_config().limit(MAX_DOCUMENT_BYTES).read_to_vec();
        let token = bytes.ok().and_then(|bytes| serde_json::from_slice::<Token>(&bytes).ok());
        let token = token.and_then(|token| token.token.or(token.access_token));
        // The token becomes the value of a header.
        token
            .filter(|token| token.bytes().all(|byte| byte.is_ascii_graphic()))
            .map(Attempt::Done)
            .ok_or_else(|| PullError::Document {
                what: "token",
                reason: "the answer contains none".to_owned(),
            })
    }

    fn login_required(&self) -> PullError {
        PullError::Login { host: self.reference.host.clone(), advice: self.credentials.advice }
    }

    fn status(&self, path: &str, status: u16, attempts: u32) -> PullError {
        PullError::Status {
            host: self.reference.host.clone(),
            path: path.to_owned(),
            status,
            attempts,
        }
    }

    fn unreachable(
        &self,
        attempts: u32,
        source: Box<dyn std::error::Error + Send + Sync>,
    ) -> PullError {
        PullError::Unreachable { host: self.reference.host.clone(), attempts, source }
    }
}

// Percent-encodes a query parameter.
fn percent_encode(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}
