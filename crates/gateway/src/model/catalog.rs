//! The models that each upstream lists. Asks the services; keeps nothing.

use std::time::Duration;

use harvest_proto::{
    SecretOwner, UpstreamKind, UpstreamName,
    api::{KeySource, ServiceModels},
};
use hyper::{
    HeaderMap, Method,
    header::{HeaderName, HeaderValue},
};
use serde::Deserialize;

use super::upstreams::Upstream;
use crate::{
    Shared,
    http::{self, Reach},
    vault::redact,
};

const TIMEOUT: Duration = Duration::from_secs(10);
const MAX_LIST_BYTES: usize = 4 * 1024 * 1024;
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// The models of an upstream. One without a key is not asked.
pub(crate) async fn list(
    shared: &Shared,
    name: &UpstreamName,
    upstream: &Upstream,
    owners: &[SecretOwner],
) -> ServiceModels {
    let service = upstream.service(name, shared.ledger.as_ref(), owners).await;
    let listed = match (upstream.kind, service.key) {
        (UpstreamKind::Scripted, _) => Ok(vec![name.to_string()]),
        (_, KeySource::Missing) => Ok(Vec::new()),
        _ => match tokio::time::timeout(TIMEOUT, fetch(shared, upstream, owners)).await {
            Ok(fetched) => fetched,
            Err(_) => Err(format!("no response within {} s", TIMEOUT.as_secs())),
        },
    };
    let (models, problem) = match listed {
        Ok(models) => (models, None),
        Err(problem) => (Vec::new(), Some(problem)),
    };
    ServiceModels { service, models, problem }
}

async fn fetch(
    shared: &Shared,
    upstream: &Upstream,
    owners: &[SecretOwner],
) -> Result<Vec<String>, String> {
    let target = match upstream.kind {
        UpstreamKind::Anthropic => "/models?limit=1000",
        UpstreamKind::Gemini => "/models?pageSize=1000",
        _ => "/models",
    };
    let url = upstream.url_of(target);
    let url = reqwest::Url::parse(&url).map_err(|_| "the URL is invalid".to_owned())?;
    let key = upstream.credential(shared.ledger.as_ref(), owners).await;
    let key = key.map_err(|_| "the key was removed".to_owned())?;
    let mut headers = HeaderMap::new();
    headers.insert(ANTHROPIC_VERSION, HeaderValue::from_static("2023-06-01"));
    key.add_to(&mut headers).map_err(|_| "the key contains invalid characters".to_owned())?;
    let mut request = reqwest::Request::new(Method::GET, url);
    *request.headers_mut() = headers;
    let sent = shared.clients.execute(request, Reach::Any).await;
    let response = sent.map_err(|_| "cannot be reached from this machine".to_owned())?;
    let status = response.status();
    if !status.is_success() {
        return Err(format!("responded with {status}"));
    }
    let text = http::read_text(response, MAX_LIST_BYTES).await;
    let secrets: Vec<_> = key.secret().into_iter().collect();
    parse(&redact(&text, &secrets)).ok_or_else(|| "responded without a list of models".to_owned())
}

fn parse(text: &str) -> Option<Vec<String>> {
    #[derive(Deserialize)]
    struct List {
        #[serde(alias = "models")]
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        #[serde(alias = "name")]
        id: String,
    }
    let list: List = serde_json::from_str(text).ok()?;
    // Gemini calls a model `models/NAME`.
    let name = |model: Model| match model.id.strip_prefix("models/") {
        Some(name) => name.to_owned(),
        None => model.id,
    };
    Some(list.data.into_iter().map(name).collect())
}
