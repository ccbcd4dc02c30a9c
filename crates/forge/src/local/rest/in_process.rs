//! Requests to the API by the server itself: the same routes and answers as over HTTP. Reads for
//! programs in sandboxes are limited to one repository and need no token; those that answer GraphQL
//! carry the client's.

use axum::{
    body::{Body, to_bytes},
    extract::Request,
    http::{Uri, header},
};
use harvest_proto::repository_name::LOCAL_OWNER;
use tower_service::Service;

use super::{client::InProcessRead, json::encode, router};
use crate::{
    ForgeFailure, LocalForge, ReadAnswer, ReadRoute,
    read_route::{MAX_READ_BYTES, next_page},
};

/// Reads for programs in sandboxes.
pub(in crate::local) async fn read(
    forge: &LocalForge,
    name: &str,
    route: &ReadRoute,
) -> Result<ReadAnswer, ForgeFailure> {
    let mut request = read_request(name, route)?;
    request.extensions_mut().insert(InProcessRead(name.to_owned()));
    send(forge, request).await
}

pub(super) fn read_request(name: &str, route: &ReadRoute) -> Result<Request, ForgeFailure> {
    // A slash in a parameter needs no encoding.
    let parameter =
        |(name, value): &(String, String)| format!("{}={}", encode(name), encode(value));
    let query: Vec<String> = route.query.iter().map(parameter).collect();
    let path = format!("/repos/{LOCAL_OWNER}/{name}{}?{}", route.path(), query.join("&"));
    let uri: Uri = path.parse().map_err(ForgeFailure::other)?;
    let request = Request::builder().uri(uri).header(header::ACCEPT, route.form.accept());
    request.body(Body::empty()).map_err(ForgeFailure::other)
}

pub(super) async fn send(forge: &LocalForge, request: Request) -> Result<ReadAnswer, ForgeFailure> {
    let mut router = router().with_state(forge.clone());
    let Ok(answered) = Service::call(&mut router, request).await;
    let (status, link) = (answered.status(), answered.headers().get(header::LINK));
    let next = link.and_then(|link| link.to_str().ok()).and_then(next_page);
    let body = to_bytes(answered.into_body(), MAX_READ_BYTES).await;
    let body = body.map_err(ForgeFailure::other)?.to_vec();
    if status.is_server_error() {
        return Err(ForgeFailure::other("the forge could not answer"));
    }
    Ok(ReadAnswer { status: status.as_u16(), body, next })
}
