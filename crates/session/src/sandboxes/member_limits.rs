//! What members may use for standalone sandboxes and one-shot commands: how many at once, how large
//! each, and nothing that other users share. Admins and commands without a server have no such
//! limits.

use harvest_proto::{
    SandboxId,
    api::{
        CreateSandbox, Role, Sandbox, SandboxLimits, SandboxList, SandboxNetwork, SandboxOwner,
        SetUserLimits, User, UserLimits,
    },
    bridge::Author,
};
use harvest_store::{GivenLimits, StoreError};

use super::{Requester, SandboxError, Sandboxes, admission::Claimant};

impl Sandboxes {
    /// The limits of a requester, if there are any.
    pub(super) async fn member_limits(
        &self,
        requester: &Requester,
    ) -> Result<Option<UserLimits>, SandboxError> {
        let (true, Some(store), Some(user)) = (requester.limited, &self.store, &requester.user)
        else {
            return Ok(None);
        };
        let given = store.user_limits_get(user).await.map_err(not_read)?;
        Ok(Some(effective(self.member_sandboxes, &given)))
    }

    /// The sandboxes that a requester may see: a member only their own.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn list_for(&self, requester: &Requester) -> Result<SandboxList, SandboxError> {
        let mut list = self.provider.get_all().await?;
        if requester.limited {
            let email = requester.user.as_deref().unwrap_or_default();
            list.items.retain(|one| is_members_own(one, email));
            list.damaged.clear();
        }
        Ok(list)
    }

    /// Whether a member with this address may use a sandbox.
    ///
    /// # Errors
    /// When there is no such sandbox.
    pub async fn is_of_member(
        &self,
        sandbox: &SandboxId,
        email: &str,
    ) -> Result<bool, SandboxError> {
        Ok(is_members_own(&self.provider.get(sandbox).await?, email))
    }

    /// What this user may use with a member's token.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn user_limits(&self, email: &str) -> Result<UserLimits, SandboxError> {
        let Some(store) = &self.store else {
            return Ok(UserLimits::default_with(self.member_sandboxes));
        };
        Ok(effective(self.member_sandboxes, &store.user_limits_get(email).await.map_err(not_read)?))
    }

    /// Changes what this user may use. Sandboxes that exist stay as they are.
    ///
    /// # Errors
    /// When a limit is out of range, or the store fails.
    pub async fn user_limits_set(
        &self,
        email: &str,
        change: SetUserLimits,
    ) -> Result<UserLimits, SandboxError> {
        check_change(email, &change)?;
        let store = self.store.as_ref().ok_or_else(|| {
            let hint = "`harvest up` starts one";
            SandboxError::conflict("no_server", "users have limits on a server only", hint)
        })?;
        let changed = store.user_limits_set(email, change).await.map_err(|error| {
            match error.is_disk_full() {
                true => SandboxError::NoSpace {
                    what: "no space left to record the limits".to_owned(),
                    hint: "free space on the server's disk, then try again".to_owned(),
                },
                false => SandboxError::failed("cannot record the limits", error),
            }
        })?;
        Ok(effective(self.member_sandboxes, &changed))
    }

    /// The users with a token or with limits of their own, by address.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn users(&self) -> Result<Vec<User>, SandboxError> {
        let Some(store) = &self.store else { return Ok(Vec::new()) };
        let tokens = store.token_list().await.map_err(not_read)?;
        let given = store.user_limits_list().await.map_err(not_read)?;
        let tokens = tokens.into_iter().map(|token| (token.user, Some(token.role)));
        Ok(merge(self.member_sandboxes, tokens.collect(), &given))
    }
}

/// The requester as a claimant of slots.
pub(super) fn claimant<'a>(
    requester: &'a Requester,
    limits: Option<&UserLimits>,
) -> Result<Claimant<'a>, SandboxError> {
    if limits.is_some_and(|limits| limits.sandboxes == 0) {
        return Err(not_allowed(
            "sandboxes_not_allowed",
            "standalone sandboxes are not allowed for this user",
        ));
    }
    let own_limit = |limits: &UserLimits| usize::try_from(limits.sandboxes).unwrap_or(usize::MAX);
    Ok(Claimant { user: requester.user.as_deref(), own_limit: limits.map(own_limit) })
}

fn not_read(error: StoreError) -> SandboxError {
    SandboxError::failed("cannot read the users' limits", error)
}

fn effective(member_sandboxes: u32, given: &GivenLimits) -> UserLimits {
    let default = UserLimits::default_with(member_sandboxes);
    UserLimits {
        sandboxes: given.sandboxes.unwrap_or(default.sandboxes),
        memory_bytes: given.memory_bytes.unwrap_or(default.memory_bytes),
        cpu_millis_per_second: given.cpu_millis_per_second.unwrap_or(default.cpu_millis_per_second),
        writable_bytes: given.writable_bytes.unwrap_or(default.writable_bytes),
        lifetime_secs: given.lifetime_secs.unwrap_or(default.lifetime_secs),
    }
}

/// One entry for each address, whatever its case; a user with any admin token is an admin.
fn merge(
    member_sandboxes: u32,
    mut known: Vec<(Author, Option<Role>)>,
    given: &[GivenLimits],
) -> Vec<User> {
    let without_token = given.iter().map(|one| {
        let user = Author { name: String::new(), email: one.email.clone() };
        (user, None)
    });
    known.extend(without_token);
    // The first of each address: an admin's token, then a member's, then none.
    known.sort_by_key(|(user, role)| {
        let rank = match role {
            Some(Role::Admin) => 0,
            Some(Role::Member) => 1,
            None => 2,
        };
        (user.email.to_ascii_lowercase(), rank)
    });
    known.dedup_by(|one, other| one.0.email.eq_ignore_ascii_case(&other.0.email));
    let user = |(user, role): (Author, Option<Role>)| {
        let own = given.iter().find(|one| one.email.eq_ignore_ascii_case(&user.email));
        let limits = effective(member_sandboxes, own.unwrap_or(&GivenLimits::default()));
        User { user, role, limits }
    };
    known.into_iter().map(user).collect()
}

// Addresses are keys of rows.
const MAX_EMAIL_BYTES: usize = 320;

fn check_change(email: &str, change: &SetUserLimits) -> Result<(), SandboxError> {
    let is_email = email.contains('@')
        && email.len() <= MAX_EMAIL_BYTES
        && !email.chars().any(|one| one.is_control() || one.is_whitespace());
    if !is_email {
        return Err(SandboxError::invalid(
            "invalid_user",
            "a user is an e-mail address: `harvest user ls` lists them",
        ));
    }
    let sandboxes = change.sandboxes.flatten().is_none_or(|count| count <= 100_000);
    let memory = change.memory_bytes.flatten();
    let memory = memory.is_none_or(|bytes| (1 << 20..=1 << 50).contains(&bytes));
    let cpu = change.cpu_millis_per_second.flatten();
    let cpu = cpu.is_none_or(|millis| (10..=4_096_000).contains(&millis));
    let writable = change.writable_bytes.flatten();
    let writable = writable.is_none_or(|bytes| (4096..=1 << 50).contains(&bytes));
    let lifetime = change.lifetime_secs.flatten();
    let lifetime = lifetime.is_none_or(|secs| (1..=315_360_000).contains(&secs));
    for (field, in_range) in [
        ("sandboxes", sandboxes),
        ("memory_bytes", memory),
        ("cpu_millis_per_second", cpu),
        ("writable_bytes", writable),
        ("lifetime_secs", lifetime),
    ] {
        if !in_range {
            let what = format!("`{field}` is out of range");
            return Err(SandboxError::invalid("invalid_limits", what));
        }
    }
    Ok(())
}

/// Whether a sandbox is a member's: a standalone one that this address created, without anything
/// that is for admins. An admin may have created it: a member's token may have the same address.
fn is_members_own(sandbox: &Sandbox, email: &str) -> bool {
    sandbox.owner != SandboxOwner::Session
        && sandbox.made_by.as_ref().is_some_and(|by| by.eq_ignore_ascii_case(email))
        && sandbox.network != SandboxNetwork::Host
        // `/mnt/state` is one of them.
        && sandbox.volumes.is_empty()
}

/// A member's request with the member's limits; a request for more is refused.
pub(super) fn applied(
    limits: Option<&UserLimits>,
    order: CreateSandbox,
) -> Result<CreateSandbox, SandboxError> {
    let Some(own) = limits else { return Ok(order) };
    let shared = |what: &str| Err(not_allowed("forbidden", &format!("only admins may {what}")));
    if order.network == SandboxNetwork::Host {
        return shared("give a sandbox the machine's own network");
    }
    if !order.volumes.is_empty() {
        return shared("mount volumes, which all users share");
    }
    if order.state == Some(true) {
        return shared("mount /mnt/state, which all standalone sandboxes share");
    }
    // The files of other people may be in it.
    if order.from.is_some() {
        return shared("start a standalone sandbox from a snapshot");
    }
    check_size(limits, &order.limits)?;
    let given = order.limits;
    let limits = SandboxLimits {
        memory_bytes: given.memory_bytes.or(Some(own.memory_bytes)),
        cpu_millis_per_second: given.cpu_millis_per_second.or(Some(own.cpu_millis_per_second)),
        pids: given.pids,
        writable_bytes: given.writable_bytes.or(Some(own.writable_bytes)),
        lifetime_secs: given.lifetime_secs.or(Some(own.lifetime_secs)),
    };
    Ok(CreateSandbox { limits, state: Some(false), ..order })
}

const MIB: u64 = 1 << 20;

// The engine's default, which the setting `limits.processes` lowers but does not raise.
const MAX_PIDS: u32 = 4096;

/// Refuses a sandbox that is larger than the user's limits.
pub(super) fn check_size(
    limits: Option<&UserLimits>,
    size: &SandboxLimits,
) -> Result<(), SandboxError> {
    let Some(own) = limits else { return Ok(()) };
    let cpu = size.cpu_millis_per_second.map(u64::from);
    for (what, unit, wanted, limit) in [
        ("MiB of memory", MIB, size.memory_bytes, own.memory_bytes),
        ("CPU milliseconds per second", 1, cpu, own.cpu_millis_per_second.into()),
        ("processes", 1, size.pids.map(u64::from), MAX_PIDS.into()),
        ("MiB of disk", MIB, size.writable_bytes, own.writable_bytes),
        ("seconds of lifetime", 1, size.lifetime_secs, own.lifetime_secs),
    ] {
        if let Some(wanted) = wanted.filter(|wanted| *wanted > limit) {
            let (wanted, limit) = (wanted.div_ceil(unit), limit / unit);
            let what = format!("{wanted} {what} are more than this user's limit of {limit}");
            return Err(not_allowed("over_limit", &what));
        }
    }
    Ok(())
}

/// As [`check_size`] for a sandbox that exists: one without a limit is larger than any.
pub(super) fn check_existing(
    limits: Option<&UserLimits>,
    size: &SandboxLimits,
) -> Result<(), SandboxError> {
    let Some(own) = limits else { return Ok(()) };
    for (what, limit) in
        [("limit of its disk", size.writable_bytes), ("end of its lifetime", size.lifetime_secs)]
    {
        if limit.is_none() {
            let what = format!("the sandbox has no {what}, and this user's sandboxes have one");
            return Err(not_allowed("over_limit", &what));
        }
    }
    check_size(Some(own), size)
}

fn not_allowed(code: &'static str, what: &str) -> SandboxError {
    SandboxError::NotAllowed {
        code,
        what: what.to_owned(),
        hint: "ask an admin: `harvest user set EMAIL` changes what a member may use".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::api::VolumeMount;

    use super::*;

    const OWN: UserLimits = UserLimits::default_with(2);

    fn code(order: CreateSandbox) -> &'static str {
        applied(Some(&OWN), order).err().map_or("allowed", |error| error.code())
    }

    #[test]
    fn member_gets_own_limits_and_no_shared_folder() {
        let order = applied(Some(&OWN), CreateSandbox::default()).unwrap();
        assert_eq!(order.state, Some(false));
        assert_eq!(order.limits.memory_bytes, Some(OWN.memory_bytes));
        assert_eq!(order.limits.lifetime_secs, Some(OWN.lifetime_secs));
        assert_eq!(applied(None, CreateSandbox::default()).unwrap(), CreateSandbox::default());
    }

    #[test]
    fn smaller_sandbox_keeps_its_size() {
        let limits = SandboxLimits { memory_bytes: Some(1 << 20), ..SandboxLimits::default() };
        let order = CreateSandbox { limits, ..CreateSandbox::default() };
        let order = applied(Some(&OWN), order).unwrap();
        assert_eq!(order.limits.memory_bytes, Some(1 << 20));
    }

    #[test]
    fn larger_sandbox_of_member_is_refused() {
        let with = |limits| code(CreateSandbox { limits, ..CreateSandbox::default() });
        let none = SandboxLimits::default();
        assert_eq!(with(SandboxLimits { memory_bytes: Some(OWN.memory_bytes), ..none }), "allowed");
        for larger in [
            SandboxLimits { memory_bytes: Some(OWN.memory_bytes + 1), ..none },
            SandboxLimits { cpu_millis_per_second: Some(2001), ..none },
            SandboxLimits { pids: Some(MAX_PIDS + 1), ..none },
            SandboxLimits { writable_bytes: Some(OWN.writable_bytes + 1), ..none },
            SandboxLimits { lifetime_secs: Some(OWN.lifetime_secs + 1), ..none },
        ] {
            assert_eq!(with(larger), "over_limit", "{larger:?}");
        }
    }

    #[test]
    fn shared_resources_are_refused_to_members() {
        let none = CreateSandbox::default;
        let volume = VolumeMount { name: "data".into(), inside: "/data".into(), read_only: true };
        for shared in [
            CreateSandbox { network: SandboxNetwork::Host, ..none() },
            CreateSandbox { volumes: vec![volume], ..none() },
            CreateSandbox { state: Some(true), ..none() },
            CreateSandbox { from: Some(harvest_proto::SnapshotId::random()), ..none() },
        ] {
            assert_eq!(code(shared), "forbidden");
        }
        assert_eq!(code(CreateSandbox { network: SandboxNetwork::Gateway, ..none() }), "allowed");
    }

    #[test]
    fn users_are_merged_by_address() {
        let author = |email: &str| Author { name: "Ada".to_owned(), email: email.to_owned() };
        let known = vec![
            (author("ada@example.org"), Some(Role::Member)),
            (author("Ada@Example.org"), Some(Role::Admin)),
        ];
        let eve = GivenLimits {
            email: "eve@example.org".to_owned(),
            sandboxes: Some(0),
            ..GivenLimits::default()
        };
        let users = merge(2, known, &[eve]);
        let seen: Vec<_> = users.iter().map(|one| (one.role, one.limits.sandboxes)).collect();
        assert_eq!(seen, [(Some(Role::Admin), 2), (None, 0)]);
    }
}
