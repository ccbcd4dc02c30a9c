//! What changes something is carried out to its end, though whoever asked goes away in the middle: or a session
//! would be stored that nobody drives, and a key claimed that nobody gives back.

use axum::{
    extract::Request,
    http::StatusCode,
    middleware::Next,
    response::{IntoResponse, Response},
};
use tracing::Instrument;

use crate::problem::ApiError;

/// Looking ends with the looker, and so does waiting for a sandbox of one command; everything else goes on. A
/// stream in the answer ends with its reader either way.
pub(crate) async fn to_the_end(request: Request, next: Next) -> Response {
    let once = request.uri().path() == "/v1/exec"
        && !request.headers().contains_key(crate::idempotency::HEADER);
    if request.method().is_safe() || once {
        return next.run(request).await;
    }
    let work = tokio::spawn(next.run(request).in_current_span());
    work.await.unwrap_or_else(|_| {
        let detail = "the request broke off inside the server";
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
    async fn what_was_begun_is_done_though_nobody_waits_for_it() {
        let (go, done) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (waits, says) = (Arc::clone(&go), Arc::clone(&done));
        let work = move || async move {
            waits.notified().await;
            says.notify_one();
        };
        let mut router: Router = Router::new().route("/", post(work)).layer(from_fn(to_the_end));
        let request = Request::builder().method("POST").uri("/").body(Body::empty()).unwrap();
        let asked = router.call(request);
        assert!(
            tokio::time::timeout(Duration::ZERO, asked).await.is_err(),
            "it waits, and is given up"
        );
        go.notify_one();
        done.notified().await;
    }
}
