//! TLS connections to the hosts that secrets are for. The gateway ends them with a certificate of
//! its own authority, verifies the real server, and sends every request anew with the secrets in
//! its headers. The secrets are looked up for each request; a redirect is the client's to follow.

use std::sync::{Arc, OnceLock};

use harvest_proto::Secret;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderName, HeaderValue},
};
use rustls::{
    ClientConfig,
    pki_types::{CertificateDer, ServerName},
};
use rustls_platform_verifier::Verifier;
use tokio::{
    io::{AsyncBufRead, AsyncRead, AsyncReadExt, AsyncWrite},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{
    FIRST_BYTES_TIMEOUT, RefusalReason,
    plain_http::{self, SendMode},
};
use crate::{
    authority::Authority,
    door::Door,
    http::{self, Abort, Body},
    ledger::{HostSecret, HostSecretUse},
    policy::{self, Verdict},
};

const MAX_LOGGED_PATH: usize = 500;

// A partial response could hold a part of a secret, and a compressed one could not be searched.
const NOT_REQUESTED: [HeaderName; 2] = [header::RANGE, header::IF_RANGE];

/// TLS settings for connections to real servers.
#[derive(Default)]
pub(crate) struct UpstreamTls(OnceLock<Option<Arc<ClientConfig>>>);

impl UpstreamTls {
    /// The roots are read on first use: a machine without any can still do the rest.
    fn config(&self, extra: &[CertificateDer<'static>]) -> Option<Arc<ClientConfig>> {
        let build = || {
            let built = client_config(extra);
            built.inspect_err(|error| tracing::error!(%error, "cannot verify certificates")).ok()
        };
        self.0.get_or_init(build).clone()
    }
}

fn client_config(extra: &[CertificateDer<'static>]) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Verifier::new_with_extra_roots(extra.iter().cloned(), Arc::clone(&provider))?;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A connection whose requests get secrets.
pub(crate) struct Interception<'a> {
    door: &'a Door,
    authority: &'a Authority,
    /// The host in its usual form.
    host: String,
    port: u16,
}

impl<'a> Interception<'a> {
    /// What a connection to a name goes through; `None` when no secret is for the name.
    pub(crate) async fn of(door: &'a Door, name: &str, port: u16) -> Option<Self> {
        let authority = door.shared.config.authority.as_deref()?;
        let host = policy::normalize(name)?;
        let interception = Self { door, authority, host, port };
        (!interception.secrets().await.is_empty()).then_some(interception)
    }

    async fn secrets(&self) -> Vec<HostSecret> {
        let owners = self.door.policy.host_secret_owners();
        self.door.shared.ledger.host_secrets(&owners, &self.host).await
    }

    /// Forwards the requests of a connection that began with these bytes, a TLS hello.
    pub(super) async fn forward(
        &self,
        first: Vec<u8>,
        inside: impl AsyncBufRead + AsyncWrite + Unpin,
        outside: impl AsyncRead + AsyncWrite + Unpin,
    ) -> Result<(), RefusalReason> {
        let config = self.authority.server_config(&self.host).map_err(|error| {
            tracing::error!(%error, host = self.host, "cannot issue a certificate");
            "the gateway cannot issue a certificate for the host"
        })?;
        let (rest, writer) = tokio::io::split(inside);
        let inside = tokio::io::join(std::io::Cursor::new(first).chain(rest), writer);
        let accepted = timeout(FIRST_BYTES_TIMEOUT, TlsAcceptor::from(config).accept(inside)).await;
        let Ok(Ok(inside)) = accepted else {
            // Usually a client that does not trust the authority.
            return Err(
                "the client refused the gateway's certificate; a secret is for this host".into()
            );
        };
        match self.connect(outside).await {
            Ok(outside) => {
                let mode = SendMode::WithSecrets(self);
                plain_http::forward(inside, outside, &self.host, self.port, mode).await
            }
            Err(reason) => {
                let answer = |_| std::future::ready(Ok(refusal(StatusCode::BAD_GATEWAY, &reason)));
                http::serve(inside, answer).await;
                Err(reason.into())
            }
        }
    }

    /// Connects to the real server, whose certificate must be valid for the host.
    async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        outside: S,
    ) -> Result<tokio_rustls::client::TlsStream<S>, String> {
        let shared = &self.door.shared;
        let config = shared.upstream_tls.config(&shared.config.extra_roots);
        let config = config.ok_or("the gateway has no CA certificates to verify the host with")?;
        let host = ServerName::try_from(self.host.clone()).map_err(|_| "not a valid host name")?;
        let connecting = TlsConnector::from(config).connect(host, outside);
        match timeout(FIRST_BYTES_TIMEOUT, connecting).await {
            Ok(connected) => connected.map_err(|error| format!("TLS to the host failed: {error}")),
            Err(_) => Err("TLS to the host timed out".to_owned()),
        }
    }

    /// Judges a request and puts the secrets into its headers, which hold no header of the
    /// connection any more. Returns the secrets, to be masked in the response.
    pub(super) async fn prepare(
        &self,
        request: &mut Request<Incoming>,
    ) -> Result<Vec<Secret<String>>, Response<Body>> {
        if let Verdict::Refused { reason, .. } =
            policy::judge(&self.door.network(), &self.host, self.port)
        {
            return Err(refusal(StatusCode::FORBIDDEN, &reason));
        }
        if *request.method() == Method::TRACE {
            let message = "TRACE would return the secrets of the request";
            return Err(refusal(StatusCode::METHOD_NOT_ALLOWED, message));
        }
        let (mut placed, mut used) = (Vec::<HeaderName>::new(), Vec::new());
        let secrets = self.secrets().await;
        for secret in &secrets {
            if placed.contains(secret.header.name()) {
                continue;
            }
            let value = secret.header.fill(&secret.value).ok_or_else(|| {
                let name = &secret.name;
                let message = format!(
                    "secret {name} contains characters that are invalid in a header; set it again \
                     with `harvest secret set {name}`"
                );
                refusal(StatusCode::BAD_GATEWAY, &message)
            })?;
            request.headers_mut().insert(secret.header.name(), value);
            placed.push(secret.header.name().clone());
            used.push((secret.name.clone(), secret.scope));
        }
        let values: Vec<_> = secrets.into_iter().map(|secret| secret.value).collect();
        if !used.is_empty() {
            let identity = HeaderValue::from_static("identity");
            request.headers_mut().insert(header::ACCEPT_ENCODING, identity);
            NOT_REQUESTED.iter().for_each(|name| drop(request.headers_mut().remove(name)));
            self.record(request, used, &values).await?;
        }
        Ok(values)
    }

    async fn record(
        &self,
        request: &Request<Incoming>,
        secrets: Vec<(String, harvest_proto::SecretScope)>,
        values: &[Secret<String>],
    ) -> Result<(), Response<Body>> {
        let path: String = request.uri().path().chars().take(MAX_LOGGED_PATH).collect();
        let used = HostSecretUse {
            secrets,
            host: self.host.clone(),
            method: request.method().to_string(),
            path: crate::vault::redact(&path, &values.iter().collect::<Vec<_>>()),
        };
        let recorded = self.door.shared.ledger.record_use(&self.door.policy.session, used).await;
        recorded.map_err(|refused| refusal(StatusCode::SERVICE_UNAVAILABLE, &refused.to_string()))
    }
}

/// A response of the gateway in place of the host's.
pub(super) fn refusal(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = http::text(status, &format!("harvest: {message}"));
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The host's response with the secrets masked.
pub(super) fn masked(
    response: Response<Body>,
    secrets: &[Secret<String>],
) -> Result<Response<Body>, Abort> {
    let mut encodings = response.headers().get_all(header::CONTENT_ENCODING).iter();
    if encodings.any(|encoding| encoding != "identity") {
        let message = "the host compressed its response, which cannot be searched for the secret";
        return Ok(refusal(StatusCode::BAD_GATEWAY, message));
    }
    let secrets: Vec<_> = secrets.iter().collect();
    let (parts, body) = response.into_parts();
    let contains_secret = |value: &HeaderValue| {
        let text = String::from_utf8_lossy(value.as_bytes());
        crate::vault::redact(&text, &secrets) != text
    };
    let headers = parts.headers.iter().filter(|(_, value)| !contains_secret(value));
    let headers = headers.map(|(name, value)| (name.clone(), value.clone())).collect();
    Ok(http::response(parts.status, headers, http::masked_body(body, &secrets)))
}
