//! The route of GraphQL: what `gh pr` sends, answered by requests to the REST routes with the
//! client's own token.

use async_trait::async_trait;
use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, header},
    response::{IntoResponse, Response},
};
use harvest_proto::{RepositoryName, repository_name::LOCAL_OWNER};
use serde_json::{Value, json};

use super::{error::RestError, in_process};
use crate::{
    ForgeFailure, LocalForge, ReadAnswer, ReadRoute,
    graphql::{self, GraphqlBackend, GraphqlRefusal, WantedPullRequest},
};

pub(in crate::local) async fn graphql(
    State(forge): State<LocalForge>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let Some(authorization) = headers.get(header::AUTHORIZATION).cloned() else {
        return RestError::unauthorized("Requires authentication").into_response();
    };
    Json(graphql::answer(&TokenClient { forge, authorization }, &body).await).into_response()
}

/// A client by its token, which each REST route judges.
struct TokenClient {
    forge: LocalForge,
    authorization: HeaderValue,
}

impl TokenClient {
    async fn send(
        &self,
        request: Result<Request, ForgeFailure>,
    ) -> Result<ReadAnswer, GraphqlRefusal> {
        let failed = |failure: ForgeFailure| GraphqlRefusal(failure.to_string());
        let mut request = request.map_err(failed)?;
        request.headers_mut().insert(header::AUTHORIZATION, self.authorization.clone());
        in_process::send(&self.forge, request).await.map_err(failed)
    }

    /// Creates something below a repository and returns it.
    async fn post(
        &self,
        repository: &RepositoryName,
        path: &str,
        body: Value,
    ) -> Result<Value, GraphqlRefusal> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("/repos/{repository}{path}"))
            .body(Body::from(body.to_string()))
            .map_err(ForgeFailure::other);
        let answer = self.send(request).await?;
        let mut created: Value = serde_json::from_slice(&answer.body)
            .map_err(|_| GraphqlRefusal("the forge's answer cannot be read".into()))?;
        if answer.status == 201 {
            return Ok(created);
        }
        let detail = created["errors"][0]["message"].take();
        let message = detail.as_str().or_else(|| created["message"].as_str()).unwrap_or_default();
        Err(GraphqlRefusal(message.to_owned()))
    }
}

#[async_trait]
impl GraphqlBackend for TokenClient {
    async fn read(
        &self,
        repository: &RepositoryName,
        route: ReadRoute,
    ) -> Result<ReadAnswer, GraphqlRefusal> {
        match repository.owner() {
            LOCAL_OWNER => self.send(in_process::read_request(repository.name(), &route)).await,
            _ => Err(GraphqlRefusal(format!("there is no repository {repository}"))),
        }
    }

    async fn login(&self) -> Result<String, GraphqlRefusal> {
        let request = Request::builder().uri("/user").body(Body::empty());
        let answer = self.send(request.map_err(ForgeFailure::other)).await?;
        let user: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let login = user["login"].as_str().map(str::to_owned);
        let message = user["message"].as_str().unwrap_or_default();
        login.ok_or_else(|| GraphqlRefusal(message.to_owned()))
    }

    /// A token that may only read is refused when it writes.
    fn may_push(&self, _: &RepositoryName) -> bool {
        true
    }

    fn base(&self, _: &RepositoryName) -> Option<String> {
        None
    }

    async fn open_pull_request(
        &self,
        repository: &RepositoryName,
        wanted: WantedPullRequest,
    ) -> Result<(u64, String), GraphqlRefusal> {
        let WantedPullRequest { title, body, head, base, draft } = wanted;
        let body =
            json!({"title": title, "body": body, "head": head, "base": base, "draft": draft});
        let opened = self.post(repository, "/pulls", body).await?;
        let url = opened["html_url"].as_str().unwrap_or_default().to_owned();
        Ok((opened["number"].as_u64().unwrap_or_default(), url))
    }

    async fn comment(
        &self,
        repository: &RepositoryName,
        number: u64,
        body: String,
    ) -> Result<String, GraphqlRefusal> {
        let path = format!("/issues/{number}/comments");
        let made = self.post(repository, &path, json!({ "body": body })).await?;
        Ok(made["html_url"].as_str().unwrap_or_default().to_owned())
    }
}
