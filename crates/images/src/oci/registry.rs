//! A registry client for one image: fetches manifests and blobs, logs in on demand, and retries.

use std::{cell::RefCell, thread};

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
        mut take: impl FnMut(BodyReader<'static>) -> Result<T, RequestError>,
    ) -> Result<T, PullError> {
        let path = format!("blobs/{digest}");
        self.with_retries(|| {
            let body = self.request(&path, "*/*")?.into_body();
            take(body.into_with_config().limit(u64::MAX).reader())
        })
    }

    fn document(&self, path: &str, accept: &str) -> Result<Vec<u8>, PullError> {
        self.with_retries(|| {
            let body = self.request(path, accept)?.into_body();
            let read = body.into_with_config().limit(MAX_DOCUMENT_BYTES).read_to_vec();
            read.map_err(|error| match error {
                ureq::Error::BodyExceedsLimit(_) => {
                    let reason = format!("it is larger than {MAX_DOCUMENT_BYTES} bytes");
                    PullError::Document { what: "answer of the registry", reason }.into()
                }
                error => RequestError::Interrupted(error.into()),
            })
        })
    }

    fn with_retries<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, RequestError>,
    ) -> Result<T, PullError> {
        let host = &self.reference.host;
        let mut pause = self.options.backoff;
        for attempts in 1.. {
            let error = match attempt() {
                Ok(done) => return Ok(done),
                Err(RequestError::Refused(error)) => return Err(error),
                Err(RequestError::Interrupted(source)) => {
                    PullError::Unreachable { host: host.clone(), attempts, source }
                }
                Err(RequestError::Busy { path, status }) => {
                    PullError::Status { host: host.clone(), path, status, attempts }
                }
            };
            if attempts >= self.options.attempts {
                return Err(error);
            }
            thread::sleep(pause);
            pause *= 2;
        }
        unreachable!("the last attempt returns")
    }

    fn request(&self, path: &str, accept: &str) -> Result<Response<Body>, RequestError> {
        let Reference { scheme, host, name, .. } = self.reference;
        let url = format!("{scheme}://{host}/v2/{name}/{path}");
        let mut logged_in = false;
        loop {
            let authorization =
                self.authorization.borrow().as_ref().map(|value| value.expose().clone());
            let response = self.client.get(&url, accept, authorization.as_deref())?;
            let (host, path) = (host.clone(), path.to_owned());
            let refused = match response.status().as_u16() {
                200 => return Ok(response),
                401 if !logged_in => {
                    logged_in = true;
                    self.log_in(&response)?;
                    continue;
                }
                401 | 403 => self.login_required(),
                404 => PullError::Missing { host, what: format!("{name}/{path}") },
                status if is_temporary(status) => return Err(RequestError::Busy { path, status }),
                status => PullError::Status { host, path, status, attempts: 1 },
            };
            return Err(refused.into());
        }
    }

    fn log_in(&self, response: &Response<Body>) -> Result<(), RequestError> {
        let headers = response.headers().get_all(header::WWW_AUTHENTICATE);
        let mut challenges: Vec<_> =
            headers.iter().filter_map(|value| Challenge::parse(value.to_str().ok()?)).collect();
        // Bearer first: a token is less valuable to an attacker than a password.
        challenges.sort_by_key(|challenge| *challenge == Challenge::Basic);
        let value = match challenges.into_iter().next() {
            None => return Err(self.login_required().into()),
            Some(Challenge::Basic) => {
                self.credentials.login.as_ref().ok_or_else(|| self.login_required())?.header()
            }
            Some(Challenge::Bearer { realm, service, scope }) => {
                format!("Bearer {}", self.token(&realm, service.as_deref(), scope.as_deref())?)
            }
        };
        *self.authorization.borrow_mut() = Some(Secret::new(value));
        Ok(())
    }

    fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: Option<&str>,
    ) -> Result<String, RequestError> {
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
        let response = self.client.get(&url, "application/json", login.as_deref())?;
        match response.status().as_u16() {
            200 => {}
            status if is_temporary(status) => {
                return Err(RequestError::Busy { path: "token".to_owned(), status });
            }
            _ => return Err(self.login_required().into()),
        }
        let bytes = response.into_body().into_with_config().limit(MAX_DOCUMENT_BYTES).read_to_vec();
        let token = bytes.ok().and_then(|bytes| serde_json::from_slice::<Token>(&bytes).ok());
        let token = token.and_then(|token| token.token.or(token.access_token));
        // The token becomes the value of a header.
        token.filter(|token| token.bytes().all(|byte| byte.is_ascii_graphic())).ok_or_else(|| {
            let reason = "the answer contains none".to_owned();
            PullError::Document { what: "token", reason }.into()
        })
    }

    fn login_required(&self) -> PullError {
        PullError::Login { host: self.reference.host.clone(), advice: self.credentials.advice }
    }
}

fn is_temporary(status: u16) -> bool {
    status == 429 || status >= 500
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
