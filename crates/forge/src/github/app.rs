//! Tokens of a GitHub App: each for one repository and one operation, kept in memory, and replaced
//! five minutes before they end. The App proves itself with a JSON web token.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use harvest_proto::{Secret, Timestamp};
use reqwest::{Method, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Mutex as AsyncMutex;

use super::{
    api::{Api, RawAnswer},
    settings::{AppKey, RepositoryPath},
};
use crate::{Clock, ForgeFailure, Operation, ReadForm};

// A push may take minutes.
const RENEW_BEFORE: Duration = Duration::from_secs(300);
// GitHub refuses a token from the future, and its clock may be behind.
const ISSUED_BEFORE_SECONDS: i64 = 60;
// GitHub's limit is ten minutes from now.
const VALID_SECONDS: i64 = 540;
// Seven operations of each repository in use.
const MAX_TOKENS: usize = 4000;

/// The App that signs in.
#[derive(Debug, Clone, Copy)]
pub(super) struct AppSignIn<'a> {
    pub(super) id: u64,
    pub(super) key: &'a AppKey,
    pub(super) installation: Option<u64>,
}

#[derive(Debug)]
struct HeldToken {
    value: Secret<String>,
    expires_at: Timestamp,
}

type TokenKey = (RepositoryPath, Operation);
// Requests for the same token wait for one answer; those for others do not.
type Slot = Arc<AsyncMutex<Option<HeldToken>>>;

#[derive(Debug)]
pub(super) struct AppTokens {
    clock: Clock,
    slots: Mutex<HashMap<TokenKey, Slot>>,
}

impl AppTokens {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, slots: Mutex::default() }
    }

    /// A token that is valid for five more minutes at least.
    pub(super) async fn get(
        &self,
        api: &Api,
        app: AppSignIn<'_>,
        path: &RepositoryPath,
        operation: Operation,
    ) -> Result<Secret<String>, ForgeFailure> {
        let slot = self.slot((path.clone(), operation));
        let mut token = slot.lock().await;
        let needed_until = self.clock.now().after(RENEW_BEFORE);
        if let Some(token) = token.as_ref().filter(|token| token.expires_at > needed_until) {
            return Ok(token.value.clone());
        }
        let new = self.create(api, app, path, operation).await?;
        Ok(token.insert(new).value.clone())
    }

    fn slot(&self, key: TokenKey) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() >= MAX_TOKENS && !slots.contains_key(&key) {
            slots.clear();
        }
        Arc::clone(slots.entry(key).or_default())
    }

    /// Drops a token that was refused.
    pub(super) fn forget(&self, refused: &Secret<String>) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // A slot that is locked gets a new token already.
        slots.retain(|_, slot| match slot.try_lock() {
            Ok(token) => token.as_ref().is_none_or(|token| token.value != *refused),
            Err(_) => true,
        });
    }

    async fn create(
        &self,
        api: &Api,
        app: AppSignIn<'_>,
        path: &RepositoryPath,
        operation: Operation,
    ) -> Result<HeldToken, ForgeFailure> {
        let jwt = sign(app, self.clock.now())?;
        let installation = match app.installation {
            Some(id) => id,
            None => find_installation(api, app, path, &jwt).await?,
        };
        let body = json!({"repositories": [path.name], "permissions": permissions(operation)});
        let route = format!("/app/installations/{installation}/access_tokens");
        let answer = api.request(Method::POST, &route, &jwt, |request| {
            let request = request.header(header::ACCEPT, ReadForm::Json.accept());
            request.header(header::CONTENT_TYPE, "application/json").body(body.to_string())
        });
        let answer = answer.await?;
        if answer.status != StatusCode::CREATED {
            return Err(refused(app, path, operation, &answer));
        }
        #[derive(Deserialize)]
        struct Created {
            token: Secret<String>,
            expires_at: String,
        }
        let created: Created = answer.json()?;
        let expires_at = created
            .expires_at
            .parse()
            .map_err(|_| ForgeFailure::other("GitHub's token has an end that cannot be read"))?;
        Ok(HeldToken { value: created.token, expires_at })
    }
}

/// What a token may do.
fn permissions(operation: Operation) -> Value {
    match operation {
        Operation::Fetch => json!({"contents": "read"}),
        Operation::Push => json!({"contents": "write"}),
        Operation::PullRequests => json!({"pull_requests": "write"}),
        // Without the first one GitHub refuses an App's token.
        Operation::Drafts => json!({"contents": "write", "pull_requests": "write"}),
        Operation::Statuses => json!({"statuses": "write"}),
        Operation::Actions => json!({"actions": "read"}),
        Operation::Checks => json!({"checks": "read"}),
    }
}

const fn doing(operation: Operation) -> &'static str {
    match operation {
        Operation::Fetch => "read",
        Operation::Push => "push to",
        Operation::PullRequests | Operation::Drafts => "write pull requests of",
        Operation::Statuses => "set commit statuses of",
        Operation::Actions => "read workflow runs of",
        Operation::Checks => "read check runs of",
    }
}

async fn find_installation(
    api: &Api,
    app: AppSignIn<'_>,
    path: &RepositoryPath,
    jwt: &Secret<String>,
) -> Result<u64, ForgeFailure> {
    #[derive(Deserialize)]
    struct Installation {
        id: u64,
        #[serde(default)]
        suspended_at: Option<String>,
    }
    let route = format!("/repos/{path}/installation");
    let accept =
        |request: reqwest::RequestBuilder| request.header(header::ACCEPT, ReadForm::Json.accept());
    let answer = api.request(Method::GET, &route, jwt, accept).await?;
    if !answer.status.is_success() {
        return Err(refused(app, path, Operation::Fetch, &answer));
    }
    let found: Installation = answer.json()?;
    match found.suspended_at {
        Some(_) => Err(ForgeFailure::Suspended { repository: path.to_string() }),
        None => Ok(found.id),
    }
}

/// Why GitHub gives the App no token.
fn refused(
    app: AppSignIn<'_>,
    path: &RepositoryPath,
    operation: Operation,
    answer: &RawAnswer,
) -> ForgeFailure {
    if let Some(limited) = answer.rate_limit() {
        return limited;
    }
    let (repository, problem) = (path.to_string(), answer.problem());
    let message = problem.message.to_ascii_lowercase();
    match answer.status {
        StatusCode::UNAUTHORIZED => ForgeFailure::WrongKey { id: app.id, message: problem.text() },
        StatusCode::NOT_FOUND if message.contains("integration not found") => {
            ForgeFailure::UnknownApp { id: app.id }
        }
        StatusCode::NOT_FOUND => ForgeFailure::NotInstalled { repository },
        StatusCode::FORBIDDEN if message.contains("suspended") => {
            ForgeFailure::Suspended { repository }
        }
        StatusCode::UNPROCESSABLE_ENTITY if message.contains("repositor") => {
            ForgeFailure::NotInstalled { repository }
        }
        StatusCode::FORBIDDEN | StatusCode::UNPROCESSABLE_ENTITY => {
            ForgeFailure::MissingPermission { repository, doing: doing(operation) }
        }
        status => {
            let (doing, status) = (doing(operation), status.as_u16());
            ForgeFailure::Unexpected { repository, doing, status }
        }
    }
}

/// The JSON web token by which the App proves itself.
fn sign(app: AppSignIn<'_>, now: Timestamp) -> Result<Secret<String>, ForgeFailure> {
    let seconds = now.as_millis().div_euclid(1000);
    let encode = |value: Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    let header = encode(json!({"alg": "RS256", "typ": "JWT"}));
    let claims = encode(json!({
        "iat": seconds - ISSUED_BEFORE_SECONDS,
        "exp": seconds + VALID_SECONDS,
        "iss": app.id.to_string(),
    }));
    let signed = format!("{header}.{claims}");
    let signature = app.key.sign(signed.as_bytes());
    let signature = signature.ok_or_else(|| ForgeFailure::other("cannot sign with the key"))?;
    Ok(Secret::new(format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature))))
}
