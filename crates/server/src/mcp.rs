//! `/mcp`: the API as tools of the Model Context Protocol, for an agent on a laptop that starts,
//! reads and steers sessions. A call is a request of the API with the caller's token, so rights,
//! limits and errors are those of the routes. `harvest mcp` relays standard input to it.

mod history;
mod tools;

use async_trait::async_trait;
use axum::{
    Json, Router,
    body::{self, Body},
    extract::{Request, State},
    http::{Extensions, HeaderValue, Method, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::post,
};
use harvest_session::mcp::{Answer, ToolResult, Tools, answer, refuse_version};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use crate::{
    connections::TokenAccepted,
    extract::{BODY_TIMEOUT, MAX_BODY_BYTES},
    problem::{self, ApiError},
};

/// The endpoint, in front of the routes of the API.
pub(crate) fn routes(api: &Router, shutdown: &CancellationToken) -> Router {
    let rendered = api
        .clone()
        .layer(middleware::from_fn_with_state(false, problem::render))
        .layer(middleware::from_fn(problem::assign_request_id));
    let endpoint = Endpoint { api: api.clone(), rendered, shutdown: shutdown.clone() };
    Router::new().route("/mcp", post(serve)).with_state(endpoint)
}

#[derive(Clone)]
struct Endpoint {
    api: Router,
    /// The same with errors as documents.
    rendered: Router,
    shutdown: CancellationToken,
}

/// One message, one response: no sessions of the protocol and no event streams, so a restart of the
/// server is noticed only as a failed request.
async fn serve(
    State(Endpoint { api, rendered, shutdown }): State<Endpoint>,
    request: Request,
) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    let token = head.headers.get(header::AUTHORIZATION).cloned();
    let tools = ApiTools { api: rendered, token, extensions: head.extensions, shutdown };
    // The token is checked before the message is read.
    let me = send(&api, tools.request(Method::GET, "/v1/me", None)).await;
    if !me.status().is_success() {
        return Ok(me);
    }
    let version = head.headers.get("mcp-protocol-version").and_then(|value| value.to_str().ok());
    if let Some(why) = version.and_then(refuse_version) {
        return Err(ApiError::invalid("unsupported_version", why));
    }
    let read = tokio::time::timeout(BODY_TIMEOUT, body::to_bytes(body, MAX_BODY_BYTES)).await;
    let read = read.map_err(|_| ApiError::invalid("invalid_message", "the message never ended"))?;
    let message = read.map_err(|_| {
        let why = format!("the message is longer than {MAX_BODY_BYTES} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", why)
    })?;
    let mut response = match answer(&tools, message).await {
        Answer::Response(response) => Json(response).into_response(),
        Answer::Nothing => StatusCode::ACCEPTED.into_response(),
        Answer::Invalid(error) => {
            let why = error["error"]["message"].as_str().unwrap_or_default();
            return Err(ApiError::invalid("invalid_message", why));
        }
    };
    response.extensions_mut().insert(TokenAccepted);
    Ok(response)
}

/// The tools of one request's user.
struct ApiTools {
    api: Router,
    token: Option<HeaderValue>,
    /// Of the request, such as the client's address.
    extensions: Extensions,
    shutdown: CancellationToken,
}

#[async_trait]
impl Tools for ApiTools {
    fn list(&self) -> Vec<Value> {
        tools::list()
    }

    async fn call(&self, name: &str, arguments: Value) -> Option<ToolResult> {
        tools::call(self, name, arguments).await
    }
}

impl ApiTools {
    /// Sends a request to the API; returns the status and the document.
    async fn send(&self, method: Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        let response = send(&self.api, self.request(method, path, body)).await;
        let status = response.status();
        let bytes = body::to_bytes(response.into_body(), MAX_RESPONSE_BYTES).await;
        let bytes = bytes.unwrap_or_default();
        let text = || Value::from(String::from_utf8_lossy(&bytes).into_owned());
        (status, serde_json::from_slice(&bytes).unwrap_or_else(|_| text()))
    }

    /// A request with the caller's token.
    fn request(&self, method: Method, path: &str, body: Option<Value>) -> Request {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let request = match body {
            Some(document) => request
                .header(header::CONTENT_TYPE, "application/json")
                .body(Body::from(document.to_string())),
            None => request.body(Body::empty()),
        };
        let mut request = request.expect("paths are made of ids and escaped values");
        *request.extensions_mut() = self.extensions.clone();
        request
    }
}

async fn send(api: &Router, request: Request) -> Response {
    api.clone().call(request).await.unwrap_or_else(|never| match never {})
}

/// A page of events has at most some megabytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
