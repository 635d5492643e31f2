//! Users and roles with real etcd processes: permissions, passwords, users without passwords, and repeated changes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{
    Access, Credentials, Deadlines, Etcd, EtcdClient, KeyAccess, KeyPermission, PasswordCheck,
    PermissionRange,
};

/// Long deadlines, because a busy machine computes password hashes slowly.
fn deadlines() -> Deadlines {
    Deadlines {
        connect: Duration::from_secs(30),
        status: Duration::from_secs(30),
        call: Duration::from_mins(1),
        hedge: Duration::from_secs(1),
        ..Deadlines::default()
    }
}

fn client_of(user: &str, password: &str) -> EtcdClient {
    let access = Access {
        tls: None,
        credentials: Some(Credentials {
            user: user.to_owned(),
            password: password.to_owned(),
            former: Vec::new(),
        }),
    };
    EtcdClient::with_deadlines(access, deadlines())
}

fn permission(key: &str, end: &str, access: KeyAccess) -> KeyPermission {
    KeyPermission {
        range: PermissionRange {
            key: key.as_bytes().to_vec(),
            end: end.as_bytes().to_vec(),
        },
        access,
    }
}

/// A client that logs in as a user, like the client of an application.
async fn application(url: &str, user: &str, password: &str) -> etcd_client::Client {
    let options = etcd_client::ConnectOptions::new().with_user(user, password);
    let connected = etcd_client::Client::connect([url], Some(options)).await;
    connected.unwrap()
}

async fn permissions_limit_application(url: &str) {
    let mut app = application(url, "app", "first").await;
    app.put("/app/key", "value", None).await.unwrap();
    assert!(app.put("/other", "value", None).await.is_err());
    assert!(app.get("/only", None).await.is_ok());
    assert!(app.put("/only", "value", None).await.is_err());
}

#[tokio::test]
async fn users_and_roles_are_changed_on_every_minor() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let start = Start {
            flags: vec!["--bcrypt-cost=4".to_owned()],
            ..Start::default()
        };
        let member = EtcdProcess::start(&Programs::find(minor), &start).await;
        let via = [member.client_url.clone()];
        let root = client_of("root", "correct-horse");
        let off = root.check_password(&via, "app", "first").await.unwrap();
        assert_eq!(off, PasswordCheck::Off, "{minor}");
        root.enable_auth(&via).await.unwrap();

        assert_eq!(root.role_permissions(&via, "app").await.unwrap(), None);
        assert!(root.create_role(&via, "app").await.unwrap());
        assert!(!root.create_role(&via, "app").await.unwrap(), "{minor}");
        let prefix = permission("/app/", "/app0", KeyAccess::ReadWrite);
        let one = permission("/only", "", KeyAccess::Write);
        for granted in [&prefix, &one, &prefix] {
            root.grant_permission(&via, "app", granted).await.unwrap();
        }
        // A second permission for the same range replaces the first permission.
        let one = permission("/only", "", KeyAccess::Read);
        root.grant_permission(&via, "app", &one).await.unwrap();
        let all = permission("\0", "\0", KeyAccess::Read);
        root.grant_permission(&via, "app", &all).await.unwrap();
        for _ in 0..2 {
            let revoked = root.revoke_permission(&via, "app", &all.range).await;
            revoked.unwrap();
        }
        let found = root.role_permissions(&via, "app").await.unwrap();
        assert_eq!(found, Some(vec![prefix, one]), "{minor}");

        assert_eq!(root.user_roles(&via, "app").await.unwrap(), None);
        assert!(root.create_user(&via, "app", Some("first")).await.unwrap());
        assert!(!root.create_user(&via, "app", Some("other")).await.unwrap());
        for _ in 0..2 {
            root.grant_role(&via, "app", "app").await.unwrap();
        }
        let roles = root.user_roles(&via, "app").await.unwrap();
        assert_eq!(roles, Some(vec!["app".to_owned()]), "{minor}");
        permissions_limit_application(&member.client_url).await;

        passwords_change(&root, &via, minor).await;
        for _ in 0..2 {
            root.revoke_role(&via, "app", "app").await.unwrap();
            root.delete_user(&via, "app").await.unwrap();
            root.delete_role(&via, "app").await.unwrap();
        }
        assert_eq!(root.user_roles(&via, "app").await.unwrap(), None);
        assert_eq!(root.role_permissions(&via, "app").await.unwrap(), None);
    }
}

async fn passwords_change(root: &EtcdClient, via: &[String], minor: &str) {
    let check = async |user: &str, password: &str| {
        let checked = root.check_password(via, user, password).await;
        checked.unwrap()
    };
    assert_eq!(check("app", "first").await, PasswordCheck::Accepted);
    assert_eq!(check("app", "second").await, PasswordCheck::Rejected);
    let changed = root.set_user_password(via, "app", "second").await;
    changed.unwrap();
    assert_eq!(check("app", "first").await, PasswordCheck::Rejected);
    assert_eq!(check("app", "second").await, PasswordCheck::Accepted);
    assert_eq!(check("missing", "x").await, PasswordCheck::Rejected);
    assert!(root.create_user(via, "certificate", None).await.unwrap());
    for password in ["", "x"] {
        let checked = check("certificate", password).await;
        assert_eq!(checked, PasswordCheck::NoPassword, "{minor} {password:?}");
    }
}
