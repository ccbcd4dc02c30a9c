//! The API's root, its version, and the user behind a token.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use harvest_proto::{Timestamp, repository_name::LOCAL_OWNER};
use serde_json::{Value, json};

use super::{client::Client, error::RestError, json};

/// The version of GitHub Enterprise Server whose description the answers follow.
pub(super) const VERSION: &str = "3.19.0";

pub(super) async fn root(client: Client) -> Json<Value> {
    let urls = client.urls();
    let fields: serde_json::Map<_, _> = ROOT_URLS
        .iter()
        .map(|(field, path)| ((*field).to_owned(), urls.api(path).into()))
        .collect();
    Json(fields.into())
}

pub(super) async fn meta() -> Json<Value> {
    Json(json!({"verifiable_password_authentication": false, "installed_version": VERSION}))
}

/// The answer of a GitHub Enterprise Server without rate limits.
pub(super) async fn rate_limit() -> RestError {
    RestError::new(StatusCode::NOT_FOUND, "Rate limiting is not enabled.")
}

pub(super) async fn user(client: Client) -> Result<Response, RestError> {
    client.owner()?;
    let mut user = json::user(&client.urls(), LOCAL_OWNER);
    let since = json::time(Timestamp::from_millis(0));
    for field in ["name", "company", "location", "email", "hireable", "bio", "blog"] {
        user[field] = Value::Null;
    }
    let repositories = client.forge.names()?.len();
    for (field, count) in
        [("public_repos", 0), ("public_gists", 0), ("followers", 0), ("following", 0)]
    {
        user[field] = count.into();
    }
    user["total_private_repos"] = repositories.into();
    user["owned_private_repos"] = repositories.into();
    (user["created_at"], user["updated_at"]) = (since.clone().into(), since.into());
    for field in ["collaborators", "disk_usage", "private_gists"] {
        user[field] = 0.into();
    }
    user["two_factor_authentication"] = false.into();
    Ok(Json(user).into_response())
}

const ROOT_URLS: &[(&str, &str)] = &[
    ("current_user_url", "/user"),
    ("current_user_authorizations_html_url", "/settings/connections/applications{/client_id}"),
    ("authorizations_url", "/authorizations"),
    ("code_search_url", "/search/code?q={query}{&page,per_page,sort,order}"),
    ("commit_search_url", "/search/commits?q={query}{&page,per_page,sort,order}"),
    ("emails_url", "/user/emails"),
    ("emojis_url", "/emojis"),
    ("events_url", "/events"),
    ("feeds_url", "/feeds"),
    ("followers_url", "/user/followers"),
    ("following_url", "/user/following{/target}"),
    ("gists_url", "/gists{/gist_id}"),
    ("issue_search_url", "/search/issues?q={query}{&page,per_page,sort,order}"),
    ("issues_url", "/issues"),
    ("keys_url", "/user/keys"),
    ("label_search_url", "/search/labels?q={query}&repository_id={repository_id}{&page,per_page}"),
    ("notifications_url", "/notifications"),
    ("organization_url", "/orgs/{org}"),
    ("organization_repositories_url", "/orgs/{org}/repos{?type,page,per_page,sort}"),
    ("organization_teams_url", "/orgs/{org}/teams"),
    ("public_gists_url", "/gists/public"),
    ("rate_limit_url", "/rate_limit"),
    ("repository_url", "/repos/{owner}/{repo}"),
    ("repository_search_url", "/search/repositories?q={query}{&page,per_page,sort,order}"),
    ("current_user_repositories_url", "/user/repos{?type,page,per_page,sort}"),
    ("starred_url", "/user/starred{/owner}{/repo}"),
    ("starred_gists_url", "/gists/starred"),
    ("user_url", "/users/{user}"),
    ("user_organizations_url", "/user/orgs"),
    ("user_repositories_url", "/users/{user}/repos{?type,page,per_page,sort}"),
    ("user_search_url", "/search/users?q={query}{&page,per_page,sort,order}"),
];
