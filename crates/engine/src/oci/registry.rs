//! A registry, as far as one image needs it: answers with manifests and blobs, logs in when asked to, and
//! tries again when something broke.

use std::{cell::RefCell, io, thread};

use harvest_proto::Secret;
use serde::Deserialize;
use ureq::{
    Body, BodyReader,
    http::{Response, header},
};

use super::{
    PullError, PullOptions, Reference,
    auth::{self, Challenge, Known},
    http::{Client, Fault},
};

// Manifests, configurations and tokens of honest registries are kilobytes.
const MAX_DOCUMENT_BYTES: u64 = 4 << 20;

const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// A connection to the registry of one image.
pub(super) struct Registry<'a> {
    client: Client,
    reference: &'a Reference,
    options: &'a PullOptions,
    known: Known,
    /// The value of the `Authorization` header, once somebody asked for it.
    authorization: RefCell<Option<Secret<String>>>,
}

/// Why a blob was not taken.
pub(super) enum Taking {
    /// The connection broke.
    Broke(io::Error),
    /// It is not what was wanted.
    Refused(PullError),
}

/// How one attempt went.
enum Attempt<T> {
    Done(T),
    /// Worth another one.
    Again(PullError),
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl<'a> Registry<'a> {
    pub(super) fn new(reference: &'a Reference, options: &'a PullOptions) -> Self {
        let known = auth::known(&reference.host, options.docker_config.as_deref());
        Self {
            client: Client::new(options),
            reference,
            options,
            known,
            authorization: RefCell::new(None),
        }
    }

    /// The bytes of a manifest, by tag or digest.
    pub(super) fn manifest(&self, wanted: &str) -> Result<Vec<u8>, PullError> {
        self.document(&format!("manifests/{wanted}"), MANIFESTS)
    }

    /// The bytes of a small blob.
    pub(super) fn small_blob(&self, digest: &str) -> Result<Vec<u8>, PullError> {
        self.document(&format!("blobs/{digest}"), "*/*")
    }

    /// Streams a blob into `take`, again from its beginning when the connection broke meanwhile.
    pub(super) fn blob<T>(
        &self,
        digest: &str,
        mut take: impl FnMut(BodyReader<'static>) -> Result<T, Taking>,
    ) -> Result<T, PullError> {
        let path = format!("blobs/{digest}");
        self.tried(|attempt| match self.once(&path, "*/*", attempt)? {
            Attempt::Again(error) => Ok(Attempt::Again(error)),
            Attempt::Done(response) => {
                match take(response.into_body().into_with_config().limit(u64::MAX).reader()) {
                    Ok(taken) => Ok(Attempt::Done(taken)),
                    Err(Taking::Broke(error)) => {
                        Ok(Attempt::Again(self.broken(attempt, error.into())))
                    }
                    Err(Taking::Refused(error)) => Err(error),
                }
            }
        })
    }

    fn document(&self, path: &str, accept: &str) -> Result<Vec<u8>, PullError> {
        self.tried(|attempt| match self.once(path, accept, attempt)? {
            Attempt::Again(error) => Ok(Attempt::Again(error)),
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
                        Err(PullError::Document { what: "registry's answer", reason })
                    }
                    Err(error) => Ok(Attempt::Again(self.broken(attempt, error.into()))),
                }
            }
        })
    }

    fn tried<T>(
        &self,
        mut once: impl FnMut(u32) -> Result<Attempt<T>, PullError>,
    ) -> Result<T, PullError> {
        let attempts = self.options.attempts.max(1);
        let mut pause = self.options.backoff;
        for attempt in 1.. {
            match once(attempt)? {
                Attempt::Done(done) => return Ok(done),
                Attempt::Again(error) if attempt == attempts => return Err(error),
                Attempt::Again(_) => thread::sleep(pause),
            }
            pause *= 2;
        }
        unreachable!("the last attempt returns")
    }

    fn once(
        &self,
        path: &str,
        accept: &str,
        attempt: u32,
    ) -> Result<Attempt<Response<Body>>, PullError> {
        let Reference { scheme, host, name, .. } = self.reference;
        let url = format!("{scheme}://{host}/v2/{name}/{path}");
        let mut asked_who = false;
        loop {
            let authorization =
                self.authorization.borrow().as_ref().map(|value| value.expose().clone());
            let response = match self.client.get(&url, accept, authorization.as_deref()) {
                Ok(response) => response,
                Err(Fault::Broken(error)) => {
                    return Ok(Attempt::Again(self.broken(attempt, error.into())));
                }
                Err(Fault::Refused(error)) => return Err(error),
            };
            match response.status().as_u16() {
                200 => return Ok(Attempt::Done(response)),
                401 if !asked_who => {
                    asked_who = true;
                    if let Attempt::Again(error) = self.log_in(&response, attempt)? {
                        return Ok(Attempt::Again(error));
                    }
                }
                401 | 403 => return Err(self.login_wanted()),
                404 => {
                    return Err(PullError::Missing {
                        host: host.clone(),
                        what: format!("{name}/{path}"),
                    });
                }
                status if status == 429 || status >= 500 => {
                    return Ok(Attempt::Again(self.status(path, status, attempt)));
                }
                status => return Err(self.status(path, status, 1)),
            }
        }
    }

    fn log_in(&self, response: &Response<Body>, attempt: u32) -> Result<Attempt<()>, PullError> {
        let headers = response.headers().get_all(header::WWW_AUTHENTICATE);
        let mut challenges: Vec<_> =
            headers.iter().filter_map(|value| Challenge::parse(value.to_str().ok()?)).collect();
        // A token is worth less to a thief than a password.
        challenges.sort_by_key(|challenge| *challenge == Challenge::Basic);
        let value = match challenges.into_iter().next() {
            None => return Err(self.login_wanted()),
            Some(Challenge::Basic) => {
                self.known.login.as_ref().ok_or_else(|| self.login_wanted())?.header()
            }
            Some(Challenge::Bearer { realm, service, scope }) => {
                match self.token(&realm, service.as_deref(), scope.as_deref(), attempt)? {
                    Attempt::Done(token) => format!("Bearer {token}"),
                    Attempt::Again(error) => return Ok(Attempt::Again(error)),
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
            quoted(scope.unwrap_or(&pull))
        );
        if let Some(service) = service {
            url += &format!("&service={}", quoted(service));
        }
        let login = self.known.login.as_ref().map(auth::Login::header);
        let response = match self.client.get(&url, "application/json", login.as_deref()) {
            Ok(response) => response,
            Err(Fault::Broken(error)) => {
                return Ok(Attempt::Again(self.broken(attempt, error.into())));
            }
            Err(Fault::Refused(error)) => return Err(error),
        };
        match response.status().as_u16() {
            200 => {}
            status if status == 429 || status >= 500 => {
                return Ok(Attempt::Again(self.status("token", status, attempt)));
            }
            _ => return Err(self.login_wanted()),
        }
        let bytes = response.into_body().into_with_config().limit(MAX_DOCUMENT_BYTES).read_to_vec();
        let token = bytes.ok().and_then(|bytes| serde_json::from_slice::<Token>(&bytes).ok());
        let token = token.and_then(|token| token.token.or(token.access_token));
        // It becomes a header's value.
        token
            .filter(|token| token.bytes().all(|byte| byte.is_ascii_graphic()))
            .map(Attempt::Done)
            .ok_or_else(|| PullError::Document {
                what: "token",
                reason: "there is none in the answer".to_owned(),
            })
    }

    fn login_wanted(&self) -> PullError {
        PullError::Login { host: self.reference.host.clone(), advice: self.known.advice }
    }

    fn status(&self, path: &str, status: u16, attempts: u32) -> PullError {
        PullError::Status {
            host: self.reference.host.clone(),
            path: path.to_owned(),
            status,
            attempts,
        }
    }

    fn broken(&self, attempts: u32, source: Box<dyn std::error::Error + Send + Sync>) -> PullError {
        PullError::Unreachable { host: self.reference.host.clone(), attempts, source }
    }
}

// Everything but what every part of a URL may hold.
fn quoted(text: &str) -> String {
    let quote = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(quote).collect()
}
