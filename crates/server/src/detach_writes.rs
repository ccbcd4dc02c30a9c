//! Runs requests that change something to completion, even when the client disconnects: a cancelled
//! handler could leave a stored session without a driver or an idempotency key claimed forever.

use axum::{
    extract::Request,
    http::StatusCode,
    middleware::Next,
    response::{IntoResponse, Response},
};
use tracing::Instrument;

use crate::problem::ApiError;

/// Detaches the handler from the connection. A stream in the response body still ends with its
/// reader.
pub(crate) async fn detach_writes(request: Request, next: Next) -> Response {
    let work = tokio::spawn(next.run(request).in_current_span());
    work.await.unwrap_or_else(|_| {
        let detail = "the request handler panicked";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail).into_response()
    })
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use axum::{Router, body::Body, middleware::from_fn, routing::post};
    use tokio::sync::Notify;
    use tower_service::Service;

    use super::*;

    #[tokio::test]
    async fn write_completes_after_the_client_disconnects() {
        let (proceed, done) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (wait, signal) = (Arc::clone(&proceed), Arc::clone(&done));
        let handler = move || async move {
            wait.notified().await;
            signal.notify_one();
        };
        let mut router: Router =
            Router::new().route("/", post(handler)).layer(from_fn(detach_writes));
        let request = Request::builder().method("POST").uri("/").body(Body::empty()).unwrap();
        let response = router.call(request);
        assert!(tokio::time::timeout(Duration::ZERO, response).await.is_err(), "still waiting");
        proceed.notify_one();
        done.notified().await;
    }
}
