package runnerd

import "context"

// BearerToken is sent with every call of a connection that is made with it, over TLS alone:
//
//	grpc.Dial(address, grpc.WithTransportCredentials(tls), grpc.WithPerRPCCredentials(runnerd.BearerToken(token)))
//
// It is a credentials.PerRPCCredentials of grpc-go.
type BearerToken string

// GetRequestMetadata gives the metadata of a call.
func (token BearerToken) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(token)}, nil
}

// RequireTransportSecurity says that the token is not for others to read.
func (BearerToken) RequireTransportSecurity() bool {
	return true
}
