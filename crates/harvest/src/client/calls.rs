//! The API calls that several verbs make.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use harvest_proto::{
    RepositoryName, RepositoryRef, Secret, SessionId,
    api::{
        AddRepository, CreatePrompt, CreatePullRequest, CreateSession, ForkSession,
        MergePullRequest, Page, PoolSandbox, Prompt, PullRequest, Repository, RetentionReport,
        Session, SessionRepository, SessionState, Turn, UpdatePullRequest, UpdateRepository,
    },
};
use reqwest::Method;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{Client, with_cursor};
use crate::{identity, printer::ApiRefusal};

impl Client {
    /// The newest sessions that match a query string, at most `max`, and whether there are more.
    pub(crate) async fn sessions(&self, query: &str, max: usize) -> Result<(Vec<Session>, bool)> {
        let path = format!("/v1/sessions?limit={}&{query}", max.clamp(1, 200));
        let Page { mut items, mut next_cursor } = self.get::<Page<Session>>(&path).await?;
        while items.len() < max
            && let Some(cursor) = next_cursor
        {
            let page: Page<Session> = self.get(&with_cursor(&path, &cursor)).await?;
            items.extend(page.items);
            next_cursor = page.next_cursor;
        }
        let more = next_cursor.is_some() || items.len() > max;
        items.truncate(max);
        Ok((items, more))
    }

    /// The number of sessions in each state.
    pub(crate) async fn session_counts(&self) -> Result<BTreeMap<String, u64>> {
        self.get("/v1/sessions/counts").await
    }

    /// The sandboxes of the warm pool.
    pub(crate) async fn pool(&self) -> Result<Vec<PoolSandbox>> {
        self.all("/v1/warm").await
    }

    pub(crate) async fn session_count(&self, state: SessionState) -> Result<u64> {
        let path = format!("/v1/sessions?limit=200&state={}", state.as_str());
        Ok(self.all::<Session>(&path).await?.len() as u64)
    }

    pub(crate) async fn session(&self, id: &SessionId) -> Result<Session> {
        self.get(&format!("/v1/sessions/{id}")).await
    }

    pub(crate) async fn create(&self, body: &CreateSession) -> Result<Session> {
        // Secrets are not part of what serializes: only this request has them.
        let mut with_secrets = serde_json::to_value(body)?;
        let exposed =
            |(name, value): (&String, &Secret<String>)| (name.clone(), value.expose().clone());
        let secrets: BTreeMap<String, String> = body.secrets.iter().map(exposed).collect();
        with_secrets["secrets"] = json!(secrets);
        self.post_authored("/v1/sessions", &with_secrets).await
    }

    /// Sends a request that creates work. One that is refused because neither it nor its token
    /// names an author is sent again with the identity of git on this machine.
    async fn post_authored<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        let refused = match self.post(path, body).await {
            Err(error) if is_without_author(&error) => error,
            other => return other,
        };
        let Some(author) = identity::of_git() else { return Err(refused) };
        let mut body = serde_json::to_value(body).context("cannot write the request")?;
        body["author"] = json!(author);
        self.post(path, &body).await
    }

    pub(crate) async fn fork(&self, id: &SessionId, body: &ForkSession) -> Result<Vec<Session>> {
        let page: Page<Session> =
            self.post_authored(&format!("/v1/sessions/{id}/fork"), body).await?;
        Ok(page.items)
    }

    /// `verb` is `stop`, `resume`, `terminate` or `archive`.
    pub(crate) async fn post_verb(&self, id: &SessionId, verb: &str) -> Result<Session> {
        self.post(&format!("/v1/sessions/{id}/{verb}"), &json!({})).await
    }

    /// Returns the session and the snapshot it will resume from.
    pub(crate) async fn pause(&self, id: &SessionId) -> Result<Value> {
        self.post(&format!("/v1/sessions/{id}/pause"), &json!({})).await
    }

    pub(crate) async fn prompts(&self, id: &SessionId) -> Result<Vec<Prompt>> {
        self.all(&format!("/v1/sessions/{id}/prompts")).await
    }

    pub(crate) async fn prompt(&self, id: &SessionId, body: &CreatePrompt) -> Result<Prompt> {
        self.post_authored(&format!("/v1/sessions/{id}/prompts"), body).await
    }

    pub(crate) async fn turns(&self, id: &SessionId) -> Result<Vec<Turn>> {
        self.all(&format!("/v1/sessions/{id}/turns")).await
    }

    /// `range` is a query string or empty.
    pub(crate) async fn diff(&self, id: &SessionId, range: &str) -> Result<String> {
        self.text(&format!("/v1/sessions/{id}/diff{range}")).await
    }

    /// The snapshots that sessions hold, and those that retention would remove.
    pub(crate) async fn retention(&self) -> Result<RetentionReport> {
        self.get("/v1/retention").await
    }

    pub(crate) async fn pull_request(&self, id: &SessionId) -> Result<PullRequest> {
        self.get(&format!("/v1/sessions/{id}/pr")).await
    }

    pub(crate) async fn pull_request_create(
        &self,
        id: &SessionId,
        body: &CreatePullRequest,
    ) -> Result<Vec<SessionRepository>> {
        let page: Page<SessionRepository> =
            self.post(&format!("/v1/sessions/{id}/pr"), body).await?;
        Ok(page.items)
    }

    pub(crate) async fn pull_request_update(
        &self,
        id: &SessionId,
        body: &UpdatePullRequest,
    ) -> Result<SessionRepository> {
        let path = format!("/v1/sessions/{id}/pr");
        self.call(self.request(Method::PATCH, &path).json(body)).await
    }

    pub(crate) async fn pull_request_merge(
        &self,
        id: &SessionId,
        body: &MergePullRequest,
    ) -> Result<SessionRepository> {
        self.post(&format!("/v1/sessions/{id}/pr/merge"), body).await
    }

    pub(crate) async fn repositories(&self) -> Result<Vec<Repository>> {
        self.all("/v1/repositories").await
    }

    /// The repository that a user means.
    pub(crate) async fn repository(&self, name: &RepositoryRef) -> Result<Repository> {
        let mut found = self.all(&format!("/v1/repositories?name={name}")).await?;
        found.pop().with_context(|| format!("there is no repository {name}"))
    }

    pub(crate) async fn repository_add(&self, body: &AddRepository) -> Result<Repository> {
        self.post("/v1/repositories", body).await
    }

    pub(crate) async fn repository_update(
        &self,
        name: &RepositoryName,
        body: &UpdateRepository,
    ) -> Result<Repository> {
        let path = format!("/v1/repositories/{name}");
        self.call(self.request(Method::PATCH, &path).json(body)).await
    }

    /// Stores the secret at `path`.
    pub(crate) async fn secret_set(&self, path: &str, body: &Value) -> Result<()> {
        self.send(self.request(Method::PUT, path).json(body)).await.map(drop)
    }
}

fn is_without_author(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ApiRefusal>().is_some_and(|refusal| refusal.0.code == "no_author")
}
